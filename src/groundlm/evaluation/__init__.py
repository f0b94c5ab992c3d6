"""Scores of a trained language model: perplexity, bits per byte, LAMBADA, lm-eval's tasks."""

from groundlm.evaluation.lambada import score_lambada
from groundlm.evaluation.perplexity import score

__all__ = ["score", "score_lambada"]
