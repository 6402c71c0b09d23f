"""What a reader sees of a run: page, figures, terminal, TensorBoard."""
