"""Measurements of the loss along directions: derivatives, lines and planes."""
