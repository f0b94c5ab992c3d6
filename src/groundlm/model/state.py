"""The whole context of a GPN: one vector, its grounded twin and the memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundlm.errors import UserError
from groundlm.model.alignment import aligned

if TYPE_CHECKING:
    from groundlm.model.config import GPNConfig

FILE_KIND = "groundlm-state"
MODEL_SIZES = ("vocab_size", "embedding_size", "ffn_size", "num_layers")
"""Sizes that a state file names beside the state's own, when the configuration is at hand."""


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
        for rows that are not there.
        """
        return self.map(_row_picker(index, self.batch_size, self.predicted_BD.device))

    def repeat(self, times: int) -> GPNState:
        """Each row `times` times in a row, as `generate` lays out beams: [a, b] -> [a, a, b, b]."""
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
        config: GPNConfig | None = None,
    ) -> None:
        """Write all rows, or only those asked for, to one safetensors file.

        Its metadata names the state's sizes, and with `config` the other sizes of the model too.
        The file is complete or not there at all.
        """
        chosen = replace(self, hash_before_B=None).detach().to("cpu")
        if rows is not None:
            chosen = chosen.rows(rows)
        sizes = self.sizes
        if config is not None:
            self.check(config)
            sizes |= {name: getattr(config, name) for name in MODEL_SIZES}
        # One entry: several would be written in an order that changes from run to run.
        metadata = {FILE_KIND: json.dumps(sizes)}
        partial = Path(f"{path}.partial")
        try:
            save_file({k: v.contiguous() for k, v in chosen.tensors().items()}, partial, metadata)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"state {path} cannot be written: {error}") from None

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: GPNConfig | None = None,
        device: torch.device | str | None = None,
    ) -> GPNState:
        """Read what `save` wrote; with `config`, refuse the state of a model of other sizes.

        Raises `UserError` in one line for a file that is missing, damaged, no state, or holds a
        number that is not finite.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names = file.keys()  # the numbers of what follows must be those of the kept state
                tensors: dict[str, Any] = {n: aligned(file.get_tensor(n)) for n in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"state {path} cannot be read: {error}") from None
        if FILE_KIND not in metadata:
            raise UserError(f"{path} is no GPN state: its metadata has no {FILE_KIND!r}")
        sizes = json.loads(metadata[FILE_KIND])
        expected = {"predicted_BD", "grounded_BD", "tokens_seen"}
        expected |= {"memory_BHKV"} if sizes["num_heads"] else set()
        if missing := expected - tensors.keys():
            raise UserError(f"state {path} is damaged: it has no {', '.join(sorted(missing))}")
        if config is not None:
            _check_sizes(sizes, config, f"state {path}")
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise UserError(f"state {path} is damaged: {name} has numbers that are not finite")
        tensors.setdefault("memory_BHKV", None)
        return cls(**tensors).to(device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Most positions walked so far, under the name that transformers' `generate` uses."""
        return int(self.positions_seen.max()) if self.batch_size else 0

    def crop(self, max_length: int) -> None:
        """Refused: what has been read cannot be taken out of a state again."""
        raise UserError(
            "a GPN state cannot be cut back to an earlier token: keep the state from before instead"
        )


def _row_picker(index: Any, batch: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    if isinstance(index, slice):
        index = list(range(batch)[index])
    picked = torch.as_tensor(index, device=device)
    if picked.dtype == torch.bool:
        if picked.shape != (batch,):
            raise UserError(f"{picked.numel()} booleans cannot choose among {batch} rows")
        picked = picked.nonzero().squeeze(1)
    picked = picked.long().reshape(-1)
    # Asking on an accelerator would stall it at every step of beam search.
    if device.type == "cpu" and picked.numel():
        low, high = (int(x) for x in torch.aminmax(picked))
        if low < -batch or high >= batch:
            bad = low if low < -batch else high
            raise UserError(f"row {bad} is not there: the state has {batch} rows")
        picked = picked % batch
    return lambda t: t.index_select(0, picked)


def _check_sizes(sizes: dict[str, int], config: GPNConfig, what: str) -> None:
    for name, have in sizes.items():
        want = getattr(config, name)
        if have != want:
            raise UserError(
                f"{what} is of another model: its {name} is {have}, this model has {want}"
            )
