"""Primitives where plain JAX needs too much memory; each behaves like plain JAX."""
