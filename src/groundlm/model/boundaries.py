"""Which tokens count and where a document starts, from the forms that callers bring it in."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor

from groundlm.errors import UserError

# What transformers hands to every model. A GPN has no use for them; where they repeat the document
# boundaries, `position_ids` says the same.
IGNORED = frozenset(
    ("output_attentions", "return_dict", "is_causal", "max_length_q", "max_length_k")
)
REPEATED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))


def refuse_unknown(given: dict[str, Any], known: tuple[str, ...], has_position_ids: bool) -> None:
    """Raise `UserError` for an argument that `forward` would otherwise swallow."""
    for name, value in given.items():
        if name in IGNORED or value is None or value is False:
            continue
        if name not in REPEATED:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"unknown argument {name!r}{hint}")
        if not has_position_ids:
            raise UserError(f"{name} is given without position_ids: pass cu_seqlens or resets")


def require_whole_numbers(name: str, ids: Tensor) -> None:
    """Raise `UserError` for token ids or labels of a dtype that can hold no vocabulary."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{name} is {ids.dtype}, expected whole numbers (int64 or int32)")


def check_positions(logits_to_keep: int | Tensor, time: int) -> None:
    """Raise `UserError` for a position that is not among the T given, or a count below 0."""
    if not isinstance(logits_to_keep, Tensor):
        if logits_to_keep < 0:
            raise UserError(f"logits_to_keep is {logits_to_keep}: it must be at least 0")
    elif logits_to_keep.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in torch.aminmax(logits_to_keep))
        if low < -time or high >= time:
            bad = low if low < -time else high
            raise UserError(f"logits_to_keep holds position {bad}, there are {time}")


def window_mask(attention_mask: Tensor | None, batch: int, time: int) -> Tensor | None:
    """Bool [B, T] of the tokens that count, or None when all do."""
    if attention_mask is None:
        return None
    if (
        attention_mask.dim() != 2
        or attention_mask.shape[0] != batch
        or attention_mask.shape[1] < time
    ):
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected {(batch, time)}"
        )
    mask_BT = attention_mask[:, -time:].bool()
    if torch.compiler.is_compiling():
        return mask_BT
    return None if bool(mask_BT.all()) else mask_BT


def document_starts(
    batch: int,
    time: int,
    resets: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Bool [B, T] of the tokens before which the state starts afresh, and a mask of real tokens.

    `position_ids` [B, T] start a document at every 0. `cu_seqlens` [N + 1] bounds the documents of
    a single packed row: the first goes on from the state given, documents may be empty, and rows
    past the last boundary are no tokens at all. At most one of the three may be given.
    """
    if resets is None and position_ids is None and cu_seqlens is None:
        return None, None
    forms = {"resets": resets, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise UserError("give one of resets, position_ids and cu_seqlens: they say the same")
    for name, form in given.items():
        if not isinstance(form, Tensor):
            raise UserError(f"{name} is a {type(form).__name__}, expected a tensor")
    if cu_seqlens is not None:
        return _from_cu_seqlens(cu_seqlens, batch, time)
    flags = resets
    if position_ids is not None:
        flags = (position_ids == 0).expand(batch, -1)
    assert flags is not None
    if flags.shape != (batch, time):
        name = "resets" if position_ids is None else "position_ids"
        raise UserError(f"{name} has shape {tuple(flags.shape)}, expected {(batch, time)}")
    flags = flags.bool()
    if not torch.compiler.is_compiling() and not bool(flags.any()):
        return None, None
    return flags, None


def _from_cu_seqlens(
    cu_seqlens: Tensor, batch: int, time: int
) -> tuple[Tensor | None, Tensor | None]:
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        have = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise UserError(f"cu_seqlens is {have}, expected whole numbers in one dimension")
    bounds = [int(x) for x in cu_seqlens.tolist()]
    if batch != 1:
        raise UserError(f"cu_seqlens bounds the documents of one packed row, not of {batch} rows")
    if bounds[:1] != [0] or sorted(bounds) != bounds or bounds[-1] > time:
        raise UserError(f"cu_seqlens {bounds} must rise from 0 to at most the {time} tokens given")
    places = torch.arange(time, device=cu_seqlens.device)[None]
    starts = cu_seqlens[1:-1]
    resets_BT = (places[..., None] == starts).any(-1) if len(starts) else None
    return resets_BT, None if bounds[-1] == time else places < bounds[-1]
