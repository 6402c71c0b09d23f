"""The shared parts of both hosts' command lines: flags, errors, exit status."""
