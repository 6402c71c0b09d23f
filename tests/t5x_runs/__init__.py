"""T5X's real commands, and the analysis, run from a directory unrelated to this one."""
