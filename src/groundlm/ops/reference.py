"""The reference scan: the cell, once per token, under autograd."""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groundlm.model import cell
from groundlm.model.cell import Carry, CellParams, Tap, untouched


def reference_scan(
    token_BTD: Tensor,
    params: CellParams,
    carry: Carry,
    resets_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
    recompute: bool = False,
    tap: Tap = untouched,
) -> tuple[Tensor, Carry]:
    """Walk the window token by token; see `groundlm.ops.grounded_scan` for the contract."""
    if not recompute:
        return _walk(token_BTD, params, carry, resets_BT, mask_BT, tap)
    outputs, length = [], segment_tokens(token_BTD.shape[1])
    for first in range(0, token_BTD.shape[1], length):
        part = slice(first, first + length)
        flags = (None if x is None else x[:, part] for x in (resets_BT, mask_BT))
        predicted_BTD, carry = checkpoint(
            _walk, token_BTD[:, part], params, carry, *flags, tap, use_reentrant=False
        )
        outputs.append(predicted_BTD)
    return torch.cat(outputs, 1), carry


def segment_tokens(time: int) -> int:
    """Tokens per recomputed segment, about sqrt(T): as many states are kept as a segment has."""
    return math.isqrt(time - 1) + 1


def _walk(
    token_BTD: Tensor,
    params: CellParams,
    carry: Carry,
    resets_BT: Tensor | None,
    mask_BT: Tensor | None,
    tap: Tap,
) -> tuple[Tensor, Carry]:
    predicted, grounded, memory = carry
    outputs = []
    for t in range(token_BTD.shape[1]):
        if resets_BT is not None:
            nothing = predicted.new_zeros(())
            reset_B = resets_BT[:, t]
            predicted, grounded = (_pick(reset_B, nothing, x) for x in (predicted, grounded))
            memory = None if memory is None else _pick(reset_B, nothing, memory)
        before = (predicted, grounded, memory)
        predicted, grounded, memory = cell.step(token_BTD[:, t], *before, params, tap)
        if mask_BT is not None:
            kept_B = mask_BT[:, t]
            predicted = _pick(kept_B, predicted, before[0])
            grounded = _pick(kept_B, grounded, before[1])
            if memory is not None and before[2] is not None:
                memory = _pick(kept_B, memory, before[2])
        outputs.append(predicted)
    return torch.stack(outputs, 1), (predicted, grounded, memory)


def _pick(flag_B: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row by row `yes` where the flag is set, else `no` [B, ...]."""
    return torch.where(flag_B.view(-1, *[1] * (no.dim() - 1)), yes, no)
