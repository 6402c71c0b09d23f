"""Products of derivative matrices with vectors."""
