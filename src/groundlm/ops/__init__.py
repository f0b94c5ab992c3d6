"""Operations over whole windows: the scan and the loss."""

from groundlm.ops.linear_cross_entropy import linear_cross_entropy
from groundlm.ops.scan import BACKENDS, grounded_scan, resolve_backend

__all__ = ["BACKENDS", "grounded_scan", "linear_cross_entropy", "resolve_backend"]
