"""The whole context of a GPN: one vector, its grounded twin and the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class GPNState:
    """Everything a GPN carries from one token to the next, for B sequences.

    A step returns a new state and leaves the old one as it was, so keeping a state is keeping a
    reference. The size does not depend on how much text has been read. Tensors are float32
    whatever the weights' dtype (float64 for float64 weights). transformers sees it as the `cache`.
    """

    predicted_BD: Tensor
    """The carried prediction s^p, [B, D]."""
    grounded_BD: Tensor
    """The grounded state s^g of the last token, [B, D]; the next write takes its key from it."""
    memory_BHKV: Tensor | None
    """The matrix memory after the last write, [B, H, K, V]; None without memory."""
    tokens_seen: Tensor
    """Real tokens read so far by each row, int64 [B] (masked positions do not count)."""
    positions_seen: int = 0
    """Positions walked so far, masked ones included: the length that `generate` slices by."""

    # What transformers' generate asks of a cache: this one is no list of layers, cannot be cut
    # back to an earlier token, and takes only the tokens that it has not seen.
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        state_size: int,
        memory_shape: tuple[int, int, int] | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> GPNState:
        """The start state; `memory_shape` is (H, K, V), or None without memory."""
        vector = torch.zeros(batch_size, state_size, device=device, dtype=dtype)
        memory = (
            None
            if memory_shape is None
            else torch.zeros(batch_size, *memory_shape, device=device, dtype=dtype)
        )
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(vector, vector.clone(), memory, seen)

    @property
    def batch_size(self) -> int:
        """Number of sequences (B)."""
        return self.predicted_BD.shape[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions walked so far, under the name that transformers' `generate` uses."""
        return self.positions_seen

    def map(self, function: Callable[[Tensor], Tensor]) -> GPNState:
        """A new state with `function` applied to every tensor."""
        return replace(
            self,
            predicted_BD=function(self.predicted_BD),
            grounded_BD=function(self.grounded_BD),
            memory_BHKV=None if self.memory_BHKV is None else function(self.memory_BHKV),
            tokens_seen=function(self.tokens_seen),
        )

    def clone(self) -> GPNState:
        """A copy that shares no storage."""
        return self.map(Tensor.clone)

    def detach(self) -> GPNState:
        """The same values, cut from the graph: the cut of truncated back-propagation."""
        return self.map(Tensor.detach)

    def rows(self, index: Tensor | Sequence[int]) -> GPNState:
        """The given rows in the given order; a row may be taken several times."""
        index = torch.as_tensor(index, device=self.predicted_BD.device, dtype=torch.int64)
        return self.map(lambda t: t.index_select(0, index))
