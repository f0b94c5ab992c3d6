"""How a stream of tokens is cut into what a model reads, and the walk that scores it.

Every token of the stream is a target once. The model reads rows of consecutive tokens, each row
from the zero state: its first input is the one token before its first target (before the very first
target of the stream: the prefix). In a row, some leading targets may be read only, because an
earlier row has scored them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.errors import UserError
from groundlm.evaluation.scoring import (
    context_limit,
    evaluating,
    is_recurrent,
    read,
    target_nats,
)
from groundlm.model.modeling import GPNForCausalLM


class TokenStream(Protocol):
    """A sequence of token ids, as `groundlm.data.windows.TokenSplit` is one."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""

    @property
    def document_ends(self) -> np.ndarray:
        """Position after each document, int64, ascending, the last equal to `tokens`."""

    def read(self, start: int, length: int) -> np.ndarray:
        """Ids [start, start + length), int64."""


@dataclass(frozen=True)
class TokenList:
    """Ids in memory as a stream of one document."""

    ids: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def document_ends(self) -> np.ndarray:
        return np.array([len(self.ids)] if len(self.ids) else [], dtype=np.int64)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.ids[start : start + length]


@dataclass(frozen=True)
class Rows:
    """Rows of targets [first, end) of a stream, of which [scored, end) are scored; int64 each.

    `piece_tokens` is the most that is read at a time: longer rows are read piece by piece, with the
    state handed on.
    """

    first: np.ndarray
    scored: np.ndarray
    end: np.ndarray
    piece_tokens: int
    reset_at_documents: bool = False

    def groups(self, budget_tokens: int) -> Iterator[np.ndarray]:
        """Indices of rows that are read side by side: at most so many tokens, padding included.

        Long rows come first, so that a group holds rows of like length.
        """
        lengths = self.end - self.first
        order = np.argsort(-lengths, kind="stable")
        at = 0
        while at < len(order):
            longest = min(int(lengths[order[at]]), self.piece_tokens)
            count = max(1, budget_tokens // longest)
            yield order[at : at + count]
            at += count


@dataclass(frozen=True)
class Reading:
    """Windows of `window_tokens`, a new one every `stride_tokens` (default: no overlap).

    `state`: `reset` starts every window from the zero state, `carry` hands the state on from window
    to window through the whole stream. `whole_documents` reads each document by itself from the
    zero state to its end instead, a window being what is read at a time. The last two are for
    recurrent models. `reset_at_documents` (GPN) starts afresh at every document within a window,
    too, as a model trained with `data.reset_at_documents` has learned it.
    """

    window_tokens: int
    stride_tokens: int | None = None
    state: Literal["reset", "carry"] = "reset"
    whole_documents: bool = False
    reset_at_documents: bool = False

    @property
    def stride(self) -> int:
        """Targets that a window adds to those of the window before."""
        return self.window_tokens if self.stride_tokens is None else self.stride_tokens

    @property
    def policy(self) -> str:
        """Where the state is zero, in words for a result."""
        documents = " and at documents" if self.reset_at_documents else ""
        if self.whole_documents:
            return "reset at documents, each read whole"
        if self.state == "carry":
            return "carried from window to window" + (documents and ", reset at documents")
        return f"reset at windows{documents}, each read after the one token before it"

    def check(self, model: PreTrainedModel | None = None) -> None:
        """Raise `UserError` for numbers that do not fit each other, or not the model if given."""
        window, stride = self.window_tokens, self.stride
        if window < 1:
            raise UserError(f"--window-tokens is {window}: it must be at least 1")
        if not 1 <= stride <= window:
            raise UserError(f"--stride-tokens is {stride}: it must lie between 1 and {window}")
        carries = self.state == "carry" or self.whole_documents
        if carries and stride != window:
            raise UserError(
                f"--stride-tokens is {stride}: windows overlap only where the state is reset at "
                "each of them"
            )
        if self.state == "carry" and self.whole_documents:
            raise UserError("--state carry and --whole-documents are both given: choose one")
        if model is None:
            return
        if carries and not is_recurrent(model):
            what = "--whole-documents" if self.whole_documents else "--state carry"
            kind = model.config.model_type
            raise UserError(f"{what} needs a recurrent model, this is a {kind}")
        if self.reset_at_documents and not isinstance(model, GPNForCausalLM):
            raise UserError(
                f"--reset-at-documents needs a GPN, this is a {model.config.model_type}"
            )
        limit = context_limit(model)
        if limit is not None and window > limit:
            raise UserError(f"--window-tokens is {window}: the model reads at most {limit}")

    def rows(self, stream: TokenStream, max_windows: int = 0) -> Rows:
        """The rows over a stream; `max_windows` > 0 takes the windows at its start only."""
        total, window = stream.tokens, self.window_tokens
        if self.whole_documents:
            ends = stream.document_ends
            starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
            return Rows(starts, starts, ends, window, self.reset_at_documents)
        if max_windows:
            total = min(total, window + (max_windows - 1) * self.stride)
        if self.state == "carry":
            zero, end = np.zeros(min(total, 1), np.int64), np.full(min(total, 1), total, np.int64)
            return Rows(zero, zero, end, window, self.reset_at_documents)
        count = 1 + max(0, -((window - total) // self.stride)) if total else 0
        first = np.arange(count, dtype=np.int64) * self.stride
        end = np.minimum(first + window, total)
        scored = np.concatenate([first[:1], end[:-1]])
        return Rows(first, scored, end, window, self.reset_at_documents)


@dataclass(frozen=True)
class Scored:
    """Targets that have been scored, each array [N]."""

    positions: np.ndarray
    """Place in the stream, int64."""
    tokens: np.ndarray
    """Id, int64."""
    context_tokens: np.ndarray
    """Tokens of its row that the model had read, that before the first target included, int64."""
    nats: np.ndarray
    """Negative log-likelihood, float32 or float64."""


@torch.inference_mode()
def walk(
    model: PreTrainedModel,
    stream: TokenStream,
    rows: Rows,
    prefix_id: int,
    batch_size: int,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Scored]:
    """Score a stream.

    `batch_size` counts pieces read side by side; it changes no score beyond rounding.

    `part` (i, n) takes only every n-th group of rows, from the i-th on, for n processes to share.
    """
    groups = rows.groups(batch_size * rows.piece_tokens)
    with evaluating(model):
        for group in islice(groups, part[0], None, part[1]):
            yield from _walk_group(model, stream, rows, group, prefix_id)


def _walk_group(
    model: PreTrainedModel, stream: TokenStream, rows: Rows, group: np.ndarray, prefix_id: int
) -> Iterator[Scored]:
    longest = int((rows.end[group] - rows.first[group]).max())
    in_pieces = longest > rows.piece_tokens
    cache: Any = None
    for offset in range(0, longest, rows.piece_tokens):
        length = min(rows.piece_tokens, longest - offset)
        ids_BT = np.full((len(group), length + 1), prefix_id, dtype=np.int64)
        for ids_T, row in zip(ids_BT, group, strict=True):
            _fill(ids_T, stream, int(rows.first[row]) + offset, int(rows.end[row]))
        inputs_BT = _on(model, ids_BT[:, :-1])
        resets_BT = inputs_BT == prefix_id if rows.reset_at_documents else None
        hidden_BTE, cache = read(model, inputs_BT, cache, in_pieces, resets_BT)
        context_T = np.arange(offset + 1, offset + length + 1)
        positions_BT = rows.first[group, None] + context_T - 1
        wanted_BT = (positions_BT >= rows.scored[group, None]) & (
            positions_BT < rows.end[group, None]
        )
        targets_N = ids_BT[:, 1:][wanted_BT]
        if len(targets_N):
            nats_N = target_nats(model, hidden_BTE[_on(model, wanted_BT)], _on(model, targets_N))
            context_N = np.broadcast_to(context_T, wanted_BT.shape)[wanted_BT]
            yield Scored(positions_BT[wanted_BT], targets_N, context_N, nats_N.cpu().numpy())


def _fill(ids_T: np.ndarray, stream: TokenStream, first: int, end: int) -> None:
    """The token before target `first`, then targets up to `end`, as far as there is room."""
    end = min(end, first + len(ids_T) - 1)
    before = min(first, 1)
    if end > first:
        ids_T[1 - before : 1 + end - first] = stream.read(first - before, end - first + before)


def _on(model: PreTrainedModel, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(model.device)
