"""The parts of an analysis that use T5X: checkpoint, dataset, optimizer."""
