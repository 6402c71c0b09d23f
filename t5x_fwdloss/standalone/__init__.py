"""A small T5 host for machines without T5X: network, model, data, train, analyze."""
