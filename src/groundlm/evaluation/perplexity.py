"""Perplexity, bits per byte and what goes with them, every token scored exactly once.

The split is one stream of tokens, read as a `Reading` says. With S the sum of the nats (negative
log-likelihoods) of n targets: nats per token S / n, perplexity exp(S / n), bits per byte
S' / ln 2 / bytes, where S' leaves out the end-of-document tokens and the bytes are those of the
text in UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.data.windows import TokenSplit
from groundlm.evaluation.reading import Reading, TokenList, walk
from groundlm.evaluation.scoring import token_nats

__all__ = ["bits_per_byte", "heldout_nats", "score", "score_split", "token_nats"]


def score(
    model: PreTrainedModel,
    ids: Sequence[int] | np.ndarray | Tensor,
    window: int,
    stride: int | None = None,
    state: Literal["reset", "carry"] = "reset",
    prefix: int | None = None,
    batch_size: int = 16,
) -> tuple[float, int]:
    """Summed nats of a sequence of ids, and the number of ids scored.

    Args:
        ids: int [T]. With a `prefix` token, which is read before them, all T are scored; without,
            the first one is only read and T - 1 are.
        window, stride, state: as in `Reading`; a window is so many tokens read, or targets.
        batch_size: windows read side by side; it does not change the result.

    Raises:
        UserError: a window or stride that does not fit, a state that the model cannot carry.
    """
    values = np.asarray(ids.cpu() if torch.is_tensor(ids) else ids, dtype=np.int64)
    if prefix is None:
        if not len(values):
            return 0.0, 0
        prefix, values = int(values[0]), values[1:]
    reading = Reading(window, stride, state)
    reading.check(model)
    stream = TokenList(values)
    scored = [x.nats for x in walk(model, stream, reading.rows(stream), prefix, batch_size)]
    return math.fsum(float(x.sum(dtype=np.float64)) for x in scored), sum(map(len, scored))


def score_split(
    model: PreTrainedModel,
    split: TokenSplit,
    window_tokens: int,
    batch_size: int,
    max_windows: int = 0,
    part: tuple[int, int] = (0, 1),
    reset_at_documents: bool = False,
) -> np.ndarray:
    """Nats of every token of the split in order, read in disjoint windows from the zero state.

    `max_windows` > 0 scores the first so many windows only; `part` (i, n) only every n-th batch,
    from the i-th on. `reset_at_documents`: see `Reading`.
    """
    reading = Reading(window_tokens, reset_at_documents=reset_at_documents)
    rows = reading.rows(split, max_windows)
    scored = walk(model, split, rows, split.eos_token_id, batch_size, part)
    return np.concatenate([np.empty(0, np.float32), *(x.nats for x in scored)])


def heldout_nats(
    model: PreTrainedModel,
    split: TokenSplit,
    window_tokens: int,
    batch_size: int,
    windows: int,
    part: tuple[int, int] = (0, 1),
    reset_at_documents: bool = False,
) -> tuple[float, int]:
    """Summed nats and number of tokens over the first `windows` windows of a split (0: all of it).

    `part` (i, n) scores only every n-th batch, from the i-th on, for n processes to share.
    `reset_at_documents`: see `Reading`.
    """
    nats = score_split(model, split, window_tokens, batch_size, windows, part, reset_at_documents)
    return float(nats.sum(dtype=np.float64)), len(nats)


def bits_per_byte(text_nats: float, utf8_bytes: int) -> float:
    """Bits per byte from the summed nats of the text's tokens and its bytes in UTF-8."""
    return text_nats / math.log(2) / utf8_bytes


def unigram_nats(train: TokenSplit) -> np.ndarray:
    """Nats of each id under the training split's token counts, one added to each, float64 [W]."""
    counts = train.unigram_counts() + 1
    return -np.log(counts / counts.sum())
