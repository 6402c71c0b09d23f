"""The files of a run, and how a resumed run finds them."""
