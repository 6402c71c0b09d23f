"""What both hosts' command lines share: flags, one-sentence errors, exit status."""
