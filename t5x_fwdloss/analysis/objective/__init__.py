"""The function that is analyzed: its batches, its normalization, its derivatives."""
