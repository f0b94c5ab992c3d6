"""Interventions: what a GPN does without, or with another, part of itself.

Each is a context manager on a model. A new one is a change at a place (`taps.replacing`) or, if it
counts tokens, a function that makes the tap of one forward call (`taps.tapped`):

    def halve_reads(model):
        return replacing(model, "predict.*.read", lambda read: 0.5 * read)

Windows are read in one forward call each; "after n tokens" counts the positions of the call, with
padding among them.
B batch, H heads, K key width, V value width, D state, Y = H * V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.analysis.taps import changing, replacing, require_gpn, tapped
from groundlm.errors import UserError
from groundlm.evaluation.scoring import evaluating
from groundlm.model.cell import Tap

Intervention = AbstractContextManager[None]


def project_out(model: PreTrainedModel, direction_D: np.ndarray) -> Intervention:
    """Take the component along a direction (s-bar, as a rule) out of every s^p.

    Raises `UserError` for a direction of zero length, of another width, or that is not finite.
    """
    _check_vector(model, direction_D, "direction")
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
    _check_vector(model, mean_D, "mean state")
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
    count = _heads(model, heads)
    if len(log_decay_H) != count or not (np.asarray(log_decay_H) <= 0).all():
        raise UserError(f"log-decays {log_decay_H}: give {count} values of at most 0")
    chosen = list(heads)
    values = _tensor(model, log_decay_H)[chosen]

    def change(log_decay_BH: Tensor) -> Tensor:
        clamped_BH = log_decay_BH.clone()
        clamped_BH[:, chosen] = values.to(clamped_BH.dtype)
        return clamped_BH

    return replacing(model, "write.log_decay", change)


def read_off(model: PreTrainedModel) -> Intervention:
    """Nothing that is read reaches the state."""
    _require_memory(model)
    return replacing(model, "predict.*.read", torch.zeros_like)


def write_off(model: PreTrainedModel, after_tokens: int = 0) -> Intervention:
    """Write strength 0 after so many tokens: the memory only decays.

    From the first token on, nothing is there to be read either.
    """
    _check_after(model, after_tokens)

    def change(step: int, beta_BH: Tensor) -> Tensor:
        return beta_BH if step <= after_tokens else torch.zeros_like(beta_BH)

    return _by_step(model, "write.beta", change)


def freeze_memory(model: PreTrainedModel, after_tokens: int) -> Intervention:
    """The memory stays as it was after so many tokens: no write, no decay."""
    _check_after(model, after_tokens)

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


def swap_memory(model: PreTrainedModel, after_tokens: int, memory_HKV: np.ndarray) -> Intervention:
    """After so many tokens (at least 1) each row goes on with this memory in place of its own.

    `memory_after` gives the memory of a text.
    """
    _check_after(model, after_tokens, least=1)
    foreign_HKV = _tensor(model, memory_HKV)

    def change(step: int, own_BHKV: Tensor) -> Tensor:
        return (
            foreign_HKV.to(own_BHKV.dtype).expand_as(own_BHKV) if step == after_tokens else own_BHKV
        )

    return _by_step(model, "memory", change)


@torch.inference_mode()
def memory_after(model: PreTrainedModel, ids_T: np.ndarray) -> np.ndarray:
    """The memory after a text that starts at the zero state, [H, K, V]."""
    _require_memory(model)
    ids_1T = torch.from_numpy(np.asarray(ids_T, dtype=np.int64))[None].to(model.device)
    with evaluating(model):
        state = require_gpn(model).model(ids_1T, use_cache=True).cache
    return state.memory_BHKV[0].cpu().numpy()


def shuffle_keys(model: PreTrainedModel, seed: int = 0) -> Intervention:
    """Write every value under the key of a token drawn at random from those before it.

    Keys and values are what they were, but a query no longer meets the value that belongs to the
    key. The first token keeps its own key.
    """
    _require_memory(model)

    def make_tap() -> Tap:
        random, keys = np.random.default_rng(seed), []

        def tap(place: str, value: Tensor) -> Tensor:
            if place != "write.key":
                return value
            keys.append(value)
            return keys[random.integers(max(1, len(keys) - 1))]

        return tap

    return tapped(model, make_tap)


def fix(model: PreTrainedModel, values: dict[str, np.ndarray]) -> Intervention:
    """Values at places (`predict.0.ffn`, `ground.gate`) replaced by constants, as a rule means.

    `values`: place or pattern -> array that broadcasts to the value's shape [B, ...].
    """
    tensors = {place: _tensor(model, value) for place, value in values.items()}

    def constant(pattern: str) -> Tap:
        return lambda place, value: tensors[pattern].to(value.dtype).expand_as(value)

    return changing(model, {pattern: constant(pattern) for pattern in tensors})


@contextmanager
def reset_every(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """State and memory become zero before every so many tokens of a call, and where the call says.

    Raises `UserError` for fewer than 1 token, and in calls that give documents by `position_ids` or
    `cu_seqlens` instead of `resets`.
    """
    if tokens < 1:
        raise UserError(f"a reset every {tokens} tokens: it must be at least 1")
    base = require_gpn(model).model

    def add_resets(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if any(kwargs.get(name) is not None for name in ("position_ids", "cu_seqlens")):
            raise UserError("reset_every goes with resets, not with position_ids or cu_seqlens")
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs["inputs_embeds"] if given is None else given
        shape, device = given.shape[:2], given.device
        resets_BT = (torch.arange(shape[1], device=device) % tokens == 0).expand(shape)
        if kwargs.get("resets") is not None:
            resets_BT = resets_BT | kwargs["resets"]
        return args, kwargs | {"resets": resets_BT}

    handle = base.register_forward_pre_hook(add_resets, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _by_step(
    model: PreTrainedModel, place: str, change: Callable[[int, Tensor], Tensor]
) -> Intervention:
    """Replace the values at a place by `change(step, value)`; the first step of each call is 1."""

    def make_tap() -> Tap:
        step = 0

        def tap(at: str, value: Tensor) -> Tensor:
            nonlocal step
            if at != place:
                return value
            step += 1
            return change(step, value)

        return tap

    return tapped(model, make_tap)


def _tensor(model: PreTrainedModel, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64)).to(model.device)


def _check_vector(model: PreTrainedModel, values_D: np.ndarray, what: str) -> None:
    width = require_gpn(model).config.state_size
    if np.shape(values_D) != (width,) or not np.isfinite(values_D).all():
        raise UserError(f"the {what} has shape {np.shape(values_D)}: give {width} finite numbers")


def _require_memory(model: PreTrainedModel) -> None:
    if require_gpn(model).model.memory is None:
        raise UserError("this gpn has no memory to change")


def _check_after(model: PreTrainedModel, tokens: int, least: int = 0) -> None:
    _require_memory(model)
    if tokens < least:
        raise UserError(f"after {tokens} tokens: it must be at least {least}")


def _heads(model: PreTrainedModel, heads: Sequence[int]) -> int:
    _require_memory(model)
    count = require_gpn(model).config.num_heads
    if bad := [h for h in heads if not 0 <= h < count]:
        raise UserError(f"head {bad[0]} is not there: the memory has {count} heads")
    return count
