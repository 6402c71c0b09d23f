"""Curvature while training: what is measured around a step, for both hosts."""
