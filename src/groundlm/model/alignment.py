"""Tensors on addresses that do not depend on how they came into memory.

A file's tensors lie at any multiple of their item's size, and MKL's products may round differently
on such addresses: a loaded model would not repeat the numbers of the one that was saved.
"""

from __future__ import annotations

from torch import Tensor, nn

ALIGNMENT_BYTES = 64
"""torch's own allocations on the CPU are aligned to this."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it does not start on a multiple of 64 bytes."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def align_weights(module: nn.Module) -> None:
    """Move the parameters and buffers that need it; ties stay."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = aligned(tensor.data)
