"""Sums over scored tokens, taken batch by batch so that a split of any size fits in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from groundlm.errors import UserError
from groundlm.evaluation.reading import Scored, TokenStream

BANDS_PER_OCTAVE = 4
RESAMPLES = 1000
LEVEL = 0.95


class Tally:
    """Sums of nats over all tokens, over text tokens, by document and by tokens of context."""

    def __init__(
        self,
        stream: TokenStream,
        eos_token_id: int | None,
        unigram_nats: np.ndarray | None = None,
        bands: np.ndarray | None = None,
    ) -> None:
        """`eos_token_id` stands for no text, wherever it is; `unigram_nats` [W] is summed too.

        `bands`: as `context_bands` gives them for the whole stream, which is the default.
        """
        self._document_ends = stream.document_ends
        self._eos_token_id, self._unigram_nats = eos_token_id, unigram_nats
        self.nats, self.tokens = 0.0, 0
        self.text_nats, self.unigram_text_nats = 0.0, 0.0
        self.document_nats = np.zeros(len(self._document_ends))
        self.document_tokens = np.zeros(len(self._document_ends))
        self._bands = context_bands(stream.tokens) if bands is None else bands
        self._band_nats = np.zeros(len(self._bands))
        self._band_tokens = np.zeros(len(self._bands), np.int64)
        self._most_context = 0

    def add(self, scored: Scored) -> None:
        """Add a batch; raises `UserError` for scores that are not finite."""
        nats = scored.nats.astype(np.float64)
        if not np.isfinite(nats).all():
            raise UserError(f"{(~np.isfinite(nats)).sum()} scores of the model are not finite")
        self.nats += float(nats.sum())
        self.tokens += len(nats)
        is_text = np.full(len(nats), True)
        if self._eos_token_id is not None:
            is_text = scored.tokens != self._eos_token_id
        self.text_nats += float(nats[is_text].sum())
        if self._unigram_nats is not None:
            self.unigram_text_nats += float(self._unigram_nats[scored.tokens[is_text]].sum())
        document = np.searchsorted(self._document_ends, scored.positions, side="right")
        _add_at(self.document_nats, document, nats)
        _add_at(self.document_tokens, document, None)
        self._most_context = max(self._most_context, int(scored.context_tokens.max()))
        band = np.searchsorted(self._bands, scored.context_tokens, side="right") - 1
        _add_at(self._band_nats, band, nats)
        _add_at(self._band_tokens, band, None)

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    def by_context(self) -> list[dict[str, Any]]:
        """The loss by tokens of context: bands `from` .. `to` with their `tokens` and mean `nats`.

        Context counts the tokens of the row that the model had read, so the first target of a
        window has 1. A band is one number up to 8, then a quarter of an octave.
        """
        last = [min(int(x) - 1, self._most_context) for x in self._bands[1:]]
        return [
            {"from": int(low), "to": high, "tokens": int(count), "nats": float(nats / count)}
            for low, high, count, nats in zip(
                self._bands, last, self._band_tokens, self._band_nats, strict=False
            )
            if count
        ]

    def interval(self, seed: int = 0) -> tuple[float, float] | None:
        """Bootstrap interval of the nats per token over documents; None for fewer than two."""
        return bootstrap(self.document_nats, self.document_tokens, seed)


def context_bands(longest: int) -> np.ndarray:
    """First number of each band of context that `longest` tokens need, and one bound beyond.

    A power of two, as most windows have, is the last of its band.
    """
    last, step = list(range(2 * BANDS_PER_OCTAVE)), 2
    while last[-1] < longest:
        last += [step * k for k in range(BANDS_PER_OCTAVE, 2 * BANDS_PER_OCTAVE)]
        step *= 2
    return np.array(last, dtype=np.int64) + 1


def every_position(window_tokens: int) -> np.ndarray:
    """Bands of one number each, up to a window's length, and one bound beyond."""
    return np.arange(1, window_tokens + 2)


def bootstrap(
    sums_D: np.ndarray, counts_D: np.ndarray, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Percentile interval (95 %) of `sum(sums) / sum(counts)` when documents are drawn anew.

    Each resample draws as many documents as there are, with replacement; documents keep their
    length, so the ratio stays the mean over tokens. None for fewer than two documents.
    """
    documents = len(sums_D)
    if documents < 2:
        return None
    random = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for i in range(resamples):
        drawn = np.bincount(random.integers(documents, size=documents), minlength=documents)
        ratios[i] = drawn @ sums_D / (drawn @ counts_D)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _add_at(sums: np.ndarray, places: np.ndarray, values: np.ndarray | None) -> None:
    """Add values (or ones) where they belong; cheap however long `sums` is."""
    low = int(places.min())
    added = np.bincount(places - low, weights=values)
    sums[low : low + len(added)] += added.astype(sums.dtype)


def perplexity_of(nats_per_token: float) -> float | None:
    """exp of the mean; None where that is more than a float can hold."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return None
