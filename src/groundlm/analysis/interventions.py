"""Interventions: what a GPN does without, or with another, part of itself.

Each is a context manager on a model. A new one is a change at a place (`taps.replacing`) or, if it
counts tokens, a function that makes the tap of one forward call (`taps.tapped`):

    def halve_reads(model):
        return replacing(model, "predict.*.read", lambda read: 0.5 * read)

Windows are read in one forward call each; "after n tokens" counts the tokens of the call.
B batch, H heads, K key width, V value width, D state, Y = H * V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.analysis.taps import replacing, require_gpn, tapped
from groundlm.errors import UserError
from groundlm.model.cell import Tap

Intervention = AbstractContextManager[None]


def project_out(model: PreTrainedModel, direction_D: np.ndarray) -> Intervention:
    """Take the component along a direction (s-bar, as a rule) out of every s^p.

    Raises `UserError` for a direction of zero length.
    """
    norm = float(np.linalg.norm(direction_D))
    if norm == 0:
        raise UserError("a direction of zero length cannot be projected out")
    unit_D = _tensor(model, direction_D / norm)

    def change(state_BD: Tensor) -> Tensor:
        unit = unit_D.to(state_BD.dtype)
        return state_BD - (state_BD @ unit)[:, None] * unit

    return replacing(model, "predicted", change)


def subtract(model: PreTrainedModel, mean_D: np.ndarray) -> Intervention:
    """Put zero in the place of the mean state: s^p - s-bar, at every step."""
    shift_D = _tensor(model, mean_D)
    return replacing(model, "predicted", lambda state_BD: state_BD - shift_D.to(state_BD.dtype))


def silence_heads(model: PreTrainedModel, heads: Sequence[int]) -> Intervention:
    """Keep heads out of every read: their part of the gated answer is zero before W_o.

    The norm over all heads' answers still counts them, so the other heads' parts do not change.
    """
    count = _heads(model, heads)

    def change(gated_BY: Tensor) -> Tensor:
        parts_BHV = gated_BY.unflatten(-1, (count, -1)).clone()
        parts_BHV[:, list(heads)] = 0
        return parts_BHV.flatten(-2)

    return replacing(model, "predict.*.gated", change)


def clamp_decay(
    model: PreTrainedModel, heads: Sequence[int], log_decay_H: np.ndarray
) -> Intervention:
    """Give heads a decay that does not depend on the text.

    `log_decay_H`: values <= 0 for all heads (their means, as a rule), of which `heads` are used.
    """
    _heads(model, heads)
    chosen = list(heads)
    values = _tensor(model, log_decay_H)[chosen]

    def change(log_decay_BH: Tensor) -> Tensor:
        clamped_BH = log_decay_BH.clone()
        clamped_BH[:, chosen] = values.to(clamped_BH.dtype)
        return clamped_BH

    return replacing(model, "write.log_decay", change)


def read_off(model: PreTrainedModel) -> Intervention:
    """Nothing that is read reaches the state."""
    return replacing(model, "predict.*.read", torch.zeros_like)


def write_off(model: PreTrainedModel) -> Intervention:
    """Write strength 0: the memory only decays."""
    return replacing(model, "write.beta", torch.zeros_like)


def freeze_memory(model: PreTrainedModel, after_tokens: int) -> Intervention:
    """The memory stays as it was after so many tokens: no write, no decay."""

    def make_tap() -> Tap:
        seen, kept = 0, torch.empty(0)

        def tap(place: str, value: Tensor) -> Tensor:
            nonlocal seen, kept
            if place != "memory":
                return value
            seen += 1
            if seen <= max(after_tokens, 1):
                kept = value if after_tokens else torch.zeros_like(value)
            return value if seen <= after_tokens else kept

        return tap

    return tapped(model, make_tap)


def swap_memory(model: PreTrainedModel, after_tokens: int) -> Intervention:
    """After so many tokens each row goes on with the memory of the row before it in the batch.

    A batch of one row stays as it is.
    """

    def make_tap() -> Tap:
        seen = 0

        def tap(place: str, value: Tensor) -> Tensor:
            nonlocal seen
            if place != "memory":
                return value
            seen += 1
            return value.roll(1, 0) if seen == after_tokens else value

        return tap

    return tapped(model, make_tap)


def shuffle_keys(model: PreTrainedModel, seed: int = 0) -> Intervention:
    """Permute the components of every key, each head by its own fixed permutation.

    Writes stay consistent with each other, but queries no longer meet the keys they were meant for.
    """
    config = require_gpn(model).config
    random = np.random.default_rng(seed)
    order = np.stack([random.permutation(config.head_k_dim) for _ in range(config.num_heads)])
    order_HK = torch.from_numpy(order).to(model.device)
    return replacing(
        model, "write.key", lambda key_BHK: key_BHK.gather(-1, order_HK.expand_as(key_BHK))
    )


def fix(model: PreTrainedModel, values: dict[str, np.ndarray]) -> Intervention:
    """Values at places (`predict.0.ffn`, `ground.gate`) replaced by constants, as a rule means.

    `values`: place or pattern -> array that broadcasts to the value's shape [B, ...].
    """
    tensors = {place: _tensor(model, value) for place, value in values.items()}

    def tap(place: str, value: Tensor) -> Tensor:
        for pattern, constant in tensors.items():
            if fnmatchcase(place, pattern):
                return constant.to(value.dtype).expand_as(value)
        return value

    return tapped(model, lambda: tap)


@contextmanager
def reset_every(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """State and memory become zero before every so many tokens of a call.

    Raises `UserError` for fewer than 1 token.
    """
    if tokens < 1:
        raise UserError(f"a reset every {tokens} tokens: it must be at least 1")
    base = require_gpn(model).model

    def add_resets(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        ids_BT = args[0] if args else kwargs["input_ids"]
        resets_T = torch.arange(ids_BT.shape[1], device=ids_BT.device) % tokens == 0
        return args, kwargs | {"resets": resets_T.expand(ids_BT.shape)}

    handle = base.register_forward_pre_hook(add_resets, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _tensor(model: PreTrainedModel, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64)).to(model.device)


def _heads(model: PreTrainedModel, heads: Sequence[int]) -> int:
    count = require_gpn(model).config.num_heads
    if bad := [h for h in heads if not 0 <= h < count]:
        raise UserError(f"head {bad[0]} is not there: the memory has {count} heads")
    return count
