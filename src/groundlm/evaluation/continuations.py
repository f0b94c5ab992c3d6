"""Log-likelihoods of given continuations of given contexts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from groundlm.errors import UserError
from groundlm.evaluation.scoring import evaluating, read, target_nats_and_tops


@dataclass(frozen=True)
class Continuation:
    """What a model thinks of one continuation, token by token."""

    nats: np.ndarray
    """Negative log-likelihood of each token, float64 [n]."""
    is_top: np.ndarray
    """Whether each token is the model's most likely one, bool [n]."""
    truncated: bool
    """Whether the model was shown less than the whole context."""

    @property
    def log_likelihood(self) -> float:
        """Summed over the tokens, in nats."""
        return -float(self.nats.sum())


class _Piece(NamedTuple):
    """Tokens that are read at once; the targets are what follows the last `len(targets)`."""

    pair: int
    inputs: list[int]
    targets: list[int]


@torch.inference_mode()
def score_continuations(
    model: PreTrainedModel,
    pairs: Sequence[tuple[list[int], list[int]]],
    batch_size: int = 16,
    limit_tokens: int | None = None,
) -> list[Continuation]:
    """Score pairs of context and continuation ids; only the continuations are scored.

    Args:
        pairs: neither part may be empty: a context holds at least the prefix.
        batch_size: rows of similar length read side by side; it changes the result by rounding
            only.
        limit_tokens: read at most so many tokens before a target. What is too long loses tokens
            from the left; a continuation longer than the limit is scored in blocks of that length,
            each read after the tokens before it as far as they fit. None: read all.

    Raises:
        UserError: an empty context or continuation, or a limit under 1.
    """
    if limit_tokens is not None and limit_tokens < 1:
        raise UserError(f"the context limit is {limit_tokens} tokens: it must be at least 1")
    pieces = []
    for i, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise UserError(f"the {what} of item {i} has no tokens")
        pieces += list(_pieces(i, context, continuation, limit_tokens))
    nats: list[list[np.ndarray]] = [[] for _ in pairs]
    is_top: list[list[np.ndarray]] = [[] for _ in pairs]
    # The blocks of one pair are equally long, so a stable sort keeps their order.
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i].inputs))
    with evaluating(model):
        for first in range(0, len(order), batch_size):
            batch = [pieces[i] for i in order[first : first + batch_size]]
            for piece, piece_nats, piece_top in zip(batch, *_score(model, batch), strict=True):
                nats[piece.pair].append(piece_nats)
                is_top[piece.pair].append(piece_top)
    return [
        Continuation(
            np.concatenate(nats[i]),
            np.concatenate(is_top[i]),
            limit_tokens is not None and len(context) + len(continuation) - 1 > limit_tokens,
        )
        for i, (context, continuation) in enumerate(pairs)
    ]


def _pieces(
    pair: int, context: list[int], continuation: list[int], limit: int | None
) -> Iterator[_Piece]:
    whole = context + continuation
    step = len(continuation) if limit is None else limit
    for first in range(0, len(continuation), step):
        targets = continuation[first : first + step]
        end = len(context) + first + len(targets) - 1
        start = 0 if limit is None else max(0, end - limit)
        yield _Piece(pair, whole[start:end], targets)


def _score(
    model: PreTrainedModel, batch: list[_Piece]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Nats (float64) and top choices of each piece's targets; rows are padded on the right."""
    longest = max(len(piece.inputs) for piece in batch)
    ids_BT = np.full((len(batch), longest), batch[0].inputs[0], dtype=np.int64)
    rows, columns = [], []
    for row, piece in enumerate(batch):
        end = len(piece.inputs)
        ids_BT[row, :end] = piece.inputs
        rows += [row] * len(piece.targets)
        columns += list(range(end - len(piece.targets), end))
    device = model.device
    hidden_BTE, _ = read(model, torch.from_numpy(ids_BT).to(device))
    hidden_NE = hidden_BTE[torch.tensor(rows, device=device), torch.tensor(columns, device=device)]
    targets_N = torch.tensor([i for piece in batch for i in piece.targets], device=device)
    nats_N, is_top_N = target_nats_and_tops(model, hidden_NE, targets_N)
    cuts = np.cumsum([len(piece.targets) for piece in batch])[:-1]
    nats, is_top = nats_N.double().cpu().numpy(), is_top_N.cpu().numpy()
    return np.split(nats, cuts), np.split(is_top, cuts)
