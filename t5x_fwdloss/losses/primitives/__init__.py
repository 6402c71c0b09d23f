"""Primitives for what plain JAX keeps too much memory for; each acts like plain JAX."""
