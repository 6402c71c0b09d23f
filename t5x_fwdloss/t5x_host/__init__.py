"""What an analysis needs of T5X: checkpoint, dataset, optimizer."""
