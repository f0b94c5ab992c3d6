"""Evaluation: perplexity and bits per byte on held-out text."""
