"""Several checkpoints of a training run: which, measured alike, in one report."""
