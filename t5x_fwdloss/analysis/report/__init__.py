"""The output of a run for readers: page, figures, terminal, TensorBoard."""
