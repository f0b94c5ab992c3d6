"""The whole context of a GPN: one vector, its grounded twin and the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groundlm.errors import UserError
from groundlm.model import state_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from groundlm.model.config import GPNConfig


@dataclass(eq=False)
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
    positions_seen: Tensor = None  # type: ignore[assignment]
    """Positions walked so far by each row, masked ones included, int64 [B]: the length that
    `generate` slices by, as many as tokens if left out. A tensor, so that one compiled step serves
    every length."""
    text_hash_B: Tensor | None = None
    """Rolling hash of the tokens read, int64 [B] (see `text_hash`); None if unknown. By it
    `generate` tells sequences that begin with what the state has read from new tokens."""
    hash_before_B: Tensor | None = None
    """The hash before the prompt of the last `generate`; None if there was none."""

    # What transformers' generate asks of a cache: this one is no list of layers, cannot be cut
    # back to an earlier token, and takes only the tokens that it has not seen.
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __post_init__(self) -> None:
        if self.positions_seen is None:
            self.positions_seen = self.tokens_seen.clone()

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
        return cls(vector, vector.clone(), memory, seen, seen.clone(), seen.clone())

    @property
    def batch_size(self) -> int:
        """Number of sequences (B)."""
        return self.predicted_BD.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: B times a constant of the model, whatever has been read."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes that a state shows, under their names in `GPNConfig`."""
        sizes = {"state_size": self.predicted_BD.shape[1], "num_heads": 0}
        if self.memory_BHKV is not None:
            names = ("num_heads", "head_k_dim", "head_v_dim")
            sizes |= dict(zip(names, self.memory_BHKV.shape[1:], strict=True))
        return sizes

    def tensors(self) -> dict[str, Tensor]:
        """What the state consists of, by field name: all but the count of positions walked."""
        return {k: v for k, v in self._all_tensors().items() if k != "positions_seen"}

    def _all_tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if torch.is_tensor(v)}

    def map(self, function: Callable[[Tensor], Tensor]) -> GPNState:
        """A new state with `function` applied to every tensor."""
        changed: dict[str, Any] = {k: function(v) for k, v in self._all_tensors().items()}
        return replace(self, **changed)

    def clone(self) -> GPNState:
        """A copy that shares no storage."""
        return self.map(Tensor.clone)

    def detach(self) -> GPNState:
        """The same values, cut from the graph: the cut of truncated back-propagation."""
        return self.map(Tensor.detach)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> GPNState:
        """The state on another device; `dtype` concerns the real-valued tensors only."""
        return self.map(
            lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None)
        )

    def rows(self, index: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> GPNState:
        """The chosen rows, copied, in the given order: an index, indices, booleans or a slice.

        A row may be taken several times; a single index gives a batch of one. Raises `UserError`
        for rows that are not there and for anything else than whole numbers or booleans in a row.
        """
        picked = _picked_rows(index, self.batch_size).to(self.predicted_BD.device)
        return self.map(lambda t: t.index_select(0, picked))

    def repeat(self, times: int) -> GPNState:
        """Each row `times` times in a row, as `generate` lays out beams: [a, b] -> [a, a, b, b]."""
        if times < 0:
            raise UserError(f"rows cannot be repeated {times} times")
        return self.map(lambda t: t.repeat_interleave(times, 0))

    @staticmethod
    def concatenate(states: Sequence[GPNState]) -> GPNState:
        """One batch of all rows of the given states, in order; they must be of one model."""
        if not states:
            raise UserError("no state to concatenate")
        first = states[0]
        for other in states[1:]:
            if other.sizes != first.sizes:
                raise UserError(
                    f"states of two models cannot be one batch: {first.sizes} and {other.sizes}"
                )
        columns = {name: [vars(s)[name] for s in states] for name in first._all_tensors()}
        columns = {k: v for k, v in columns.items() if all(t is not None for t in v)}
        joined: dict[str, Any] = {k: torch.cat(v) for k, v in columns.items()}
        joined = {"text_hash_B": None, "hash_before_B": None} | joined
        return replace(first, **joined)

    def check(self, config: GPNConfig) -> None:
        """Raise `UserError`, naming the first size that differs, if it is another model's state."""
        _check_sizes(self.sizes, config, "the state")

    def save(
        self,
        path: str | Path,
        rows: int | slice | Sequence[int] | Tensor | None = None,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Write all rows, or only those asked for, to one safetensors file.

        Its metadata names the state's sizes, and with `model` the model's other sizes and the
        fingerprint of its weights too: `load` then tells that model from every other. The file is
        complete or not there at all.
        """
        chosen = self.detach().to("cpu")
        if rows is not None:
            chosen = chosen.rows(rows)
        facts: dict[str, Any] = dict(self.sizes)
        if model is not None:
            self.check(model.config)
            facts |= {name: getattr(model.config, name) for name in state_file.MODEL_SIZES}
            facts[state_file.WEIGHTS] = state_file.fingerprint(model)
        state_file.write(path, chosen.tensors(), facts)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel | None = None,
        device: torch.device | str | None = None,
    ) -> GPNState:
        """Read what `save` wrote; with `model`, refuse what was saved with any other.

        A state belongs to the weights that wrote it: training them on makes another model. What
        was saved without its model is compared in the state's own sizes alone.

        Raises `UserError` in one line for a file that is missing, damaged, no state, or holds a
        number that is not finite.
        """
        tensors, sizes, weights = state_file.read(path)
        if model is not None:
            _check_sizes(sizes, model.config, f"state {path}")
            if weights not in (None, state_file.fingerprint(model)):
                raise UserError(
                    f"state {path} is of another model: it was written with other weights"
                )
        fields: dict[str, Any] = {"memory_BHKV": None} | tensors
        return cls(**fields).to(device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Most positions walked so far, under the name that transformers' `generate` uses."""
        return int(self.positions_seen.max()) if self.batch_size else 0

    def crop(self, max_length: int) -> None:
        """Refused: what has been read cannot be taken out of a state again."""
        raise UserError(
            "a GPN state cannot be cut back to an earlier token: keep the state from before instead"
        )


def _picked_rows(index: Any, batch: int) -> Tensor:
    """The rows that an index of any kind means, int64 [N] from 0 to B - 1."""
    if isinstance(index, slice):
        index = list(range(batch)[index])
    refused = UserError(f"rows are chosen by whole numbers or booleans, not by {index!r}")
    try:
        picked = torch.as_tensor(index).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise refused from None
    if picked.dtype == torch.bool:
        if picked.shape != (batch,):
            raise UserError(f"{picked.numel()} booleans cannot choose among {batch} rows")
        return picked.nonzero().squeeze(1)
    whole = not (picked.is_floating_point() or picked.is_complex())
    if picked.dim() > 1 or not (whole or picked.shape == (0,)):  # [] becomes a float tensor
        raise refused
    picked = picked.long().reshape(-1)
    for row in picked.tolist():
        if not -batch <= row < batch:
            raise UserError(f"row {row} is not there: the state has {batch} rows")
    return picked % max(batch, 1)


def _check_sizes(sizes: dict[str, int], config: GPNConfig, what: str) -> None:
    for name, have in sizes.items():
        want = getattr(config, name)
        if have != want:
            raise UserError(
                f"{what} is of another model: its {name} is {have}, this model has {want}"
            )
