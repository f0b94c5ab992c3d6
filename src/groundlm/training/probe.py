"""A look into a GPN during training: state norm, retention, and what the memory contributes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from groundlm.model.modeling import GPNModel

PROBE_ROWS, PROBE_TOKENS = 4, 64


@torch.no_grad()
def probe(model: GPNModel, input_ids_BT: Tensor) -> dict[str, float]:
    """Read the start of a few windows step by step from the zero state.

    Returns:
        `state_norm`: mean norm of s^p. With a memory also `mean_retention`: mean over heads and
        tokens of exp(gamma), the share of the memory that a token leaves in place; and
        `memory_effect`: mean over tokens and layers of |read| / |retained state + FFN|.
    """
    figures: dict[str, list[Tensor]] = defaultdict(list)
    rest_BD = torch.empty(0)

    def listen(place: str, value: Tensor) -> Tensor:
        nonlocal rest_BD
        if place == "write.log_decay":
            figures["mean_retention"].append(value.exp().mean())
        elif place.endswith(".rest"):
            rest_BD = value
        elif place.endswith(".read"):
            figures["memory_effect"].append((value.norm(dim=-1) / rest_BD.norm(dim=-1)).mean())
        elif place == "predicted":
            figures["state_norm"].append(value.norm(dim=-1).mean())
        return value

    before, model.tap = model.tap, listen
    try:
        model(input_ids_BT[:PROBE_ROWS, :PROBE_TOKENS], use_cache=False)
    finally:
        model.tap = before
    return {name: float(torch.stack(values).mean()) for name, values in figures.items()}
