"""Means of a GPN's values at places of its taps."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.analysis.taps import listening, require_gpn
from groundlm.evaluation.scoring import evaluating


@torch.inference_mode()
def place_means(
    model: PreTrainedModel, ids_NT: np.ndarray, patterns: list[str], batch_size: int = 8
) -> dict[str, np.ndarray]:
    """Mean over windows and tokens of the values at places that match a pattern, float64.

    Args:
        ids_NT: int64 [N, T], each window read from the zero state.
        patterns: places such as `predict.*.ffn`.
    """
    sums: dict[str, Tensor] = {}

    def listen(place: str, value: Tensor) -> None:
        if any(fnmatchcase(place, pattern) for pattern in patterns):
            total = value.double().sum(0)
            sums[place] = sums[place] + total if place in sums else total

    with evaluating(model), listening(model, "*", listen):
        for first in range(0, len(ids_NT), batch_size):
            batch_BT = torch.from_numpy(ids_NT[first : first + batch_size])
            require_gpn(model).model(batch_BT.to(model.device), use_cache=False)
    return {place: (total / ids_NT.size).cpu().numpy() for place, total in sums.items()}
