"""Several runs side by side: what differs between them, and their numbers."""
