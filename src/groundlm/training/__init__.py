"""Training: configuration, optimizer, checkpoints, metrics and the loop."""
