"""The loss as a function of the network's outputs, for the curvature."""
