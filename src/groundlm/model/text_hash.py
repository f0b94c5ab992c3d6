"""A rolling hash of token ids: how a state recognises the text that it has read.

`h_t = h_{t-1} * BASE + value_t` modulo 2^64 over the real tokens since the start or the last reset;
the value is id + 1. Masked positions, and tokens of which only the embedding is known, leave it as
it is.
"""

import torch
from torch import Tensor

BASE = 6364136223846793005  # Knuth's multiplier for 64 bits; odd, so it has an inverse
_UNSIGNED = pow(BASE, -1, 1 << 64)
INVERSE = _UNSIGNED - (1 << 64) if _UNSIGNED >> 63 else _UNSIGNED


def extend_hash(
    hash_B: Tensor, values_BT: Tensor, mask_BT: Tensor | None, resets_BT: Tensor | None
) -> Tensor:
    """The hash after T more positions, int64 [B]; mask and resets as for the scan."""
    if values_BT.shape[1] == 1 and mask_BT is None and resets_BT is None:
        return hash_B * BASE + values_BT[:, 0]
    if mask_BT is None:
        mask_BT = torch.ones_like(values_BT, dtype=torch.bool)
    if resets_BT is not None:
        flags = resets_BT.long()
        mask_BT = mask_BT & (flags.flip(1).cumsum(1).flip(1) == flags)  # no reset after it
        hash_B = torch.where(resets_BT.any(1), 0, hash_B)
    counts_BT = mask_BT.long().cumsum(1)
    powers = _powers(BASE, values_BT.shape[1] + 1, values_BT)
    total_B1 = counts_BT[:, -1:]
    sum_B = (values_BT * mask_BT * powers[total_B1 - counts_BT]).sum(1)
    return hash_B * powers[total_B1[:, 0]] + sum_B


def prefix_hashes(hash_B: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The hashes after the first 0, 1, ... T of the positions, int64 [B, T + 1]."""
    time = values_BT.shape[1]
    counts_BT = mask_BT.long().cumsum(1)
    inverse = _powers(INVERSE, time + 1, values_BT)
    sums_BT = (values_BT * mask_BT * inverse[counts_BT]).cumsum(1) + hash_B[:, None]
    hashes_BT = sums_BT * _powers(BASE, time + 1, values_BT)[counts_BT]
    return torch.cat([hash_B[:, None], hashes_BT], 1)


def _powers(base: int, count: int, like: Tensor) -> Tensor:
    """`base` to the powers 0 .. count - 1."""
    powers = torch.full((count,), base, dtype=torch.int64, device=like.device)
    powers[0] = 1
    return powers.cumprod(0)
