"""The model: configuration, the recurrence, its state, and the transformers classes."""
