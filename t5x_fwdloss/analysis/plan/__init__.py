"""The plan of a run: its memory and time, from compiled functions and shapes alone."""
