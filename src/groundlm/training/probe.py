"""A look into a GPN during training: state norm, retention, and what the memory contributes."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from groundlm.model import cell
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

    def observe(place: str, values: dict[str, Tensor | None]) -> None:
        if place == "write":
            figures["mean_retention"].append(values["log_decay_BH"].exp().mean())  # type: ignore[union-attr]
        elif (read_BD := values["read"]) is not None:
            rest_BD = values["retained"] + values["ffn"]  # type: ignore[operator]
            figures["memory_effect"].append((read_BD.norm(dim=-1) / rest_BD.norm(dim=-1)).mean())

    ids_BT = input_ids_BT[:PROBE_ROWS, :PROBE_TOKENS]
    ground, params = model.ground, model.cell_params()
    token_BTD = cell.token_contribution(
        model.embedding(ids_BT), ground.token_norm.weight, ground.token_proj.weight, params.norm_eps
    )
    state = model.zero_state(len(ids_BT))
    carry = (state.predicted_BD, state.grounded_BD, state.memory_BHKV)
    for token_BD in token_BTD.unbind(1):
        carry = cell.step(token_BD, *carry, params, observe)
        figures["state_norm"].append(carry[0].norm(dim=-1).mean())
    return {name: float(torch.stack(values).mean()) for name, values in figures.items()}
