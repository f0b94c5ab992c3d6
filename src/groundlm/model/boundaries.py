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
    given = [x is not None for x in (resets, position_ids, cu_seqlens)]
    if sum(given) > 1:
        raise UserError("give one of resets, position_ids and cu_seqlens: they say the same")
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
    bounds = [int(x) for x in cu_seqlens.tolist()]
    if batch != 1:
        raise UserError(f"cu_seqlens bounds the documents of one packed row, not of {batch} rows")
    if bounds[:1] != [0] or sorted(bounds) != bounds or bounds[-1] > time:
        raise UserError(f"cu_seqlens {bounds} must rise from 0 to at most the {time} tokens given")
    places = torch.arange(time, device=cu_seqlens.device)[None]
    starts = cu_seqlens[1:-1]
    resets_BT = (places[..., None] == starts).any(-1) if len(starts) else None
    return resets_BT, None if bounds[-1] == time else places < bounds[-1]
