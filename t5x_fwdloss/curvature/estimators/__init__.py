"""Randomized estimates of traces, diagonals and spectral densities."""
