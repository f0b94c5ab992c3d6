"""What perplexity is taken of, token files or a text, and everything that is scored on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError
from groundlm.evaluation.perplexity import bits_per_byte, unigram_nats
from groundlm.evaluation.reading import Reading, TokenList, TokenStream, walk
from groundlm.evaluation.tally import Tally, perplexity_of
from groundlm.evaluation.text import TextEncoder, read_text


@dataclass(frozen=True)
class Corpus:
    """Tokens to score and what is known of them."""

    stream: TokenStream
    prefix_id: int
    eos_token_id: int | None
    utf8_bytes: int
    unigram_nats: np.ndarray | None
    named: dict[str, Any]
    """Where it is from, for the result."""


def split_corpus(split: TokenSplit, data: str | None, name: str) -> Corpus:
    """A split of token files, with the unigram model of the train split beside it."""
    unigram = unigram_nats(TokenSplit.open(split.folder.parent, "train"))
    eos = split.eos_token_id
    return Corpus(split, eos, eos, split.utf8_bytes, unigram, {"data": data, "split": name})


def text_corpus(path: str, encoder: TextEncoder) -> Corpus:
    """A text file as one document; `UserError` if it cannot be read or has no tokens."""
    text = read_text(path)
    stream = TokenList(np.array(encoder.encode(text), dtype=np.int64))
    if not stream.tokens:
        raise UserError(f"text {path} has no tokens")
    return Corpus(stream, encoder.prefix_id, None, len(text.encode()), None, {"text": path})


def score_corpus(
    model: PreTrainedModel,
    corpus: Corpus,
    reading: Reading,
    batch_size: int,
    bands: np.ndarray | None = None,
) -> dict[str, Any]:
    """Perplexity and what belongs to it, for a result; needs memory for one batch and the sums.

    `bands` of `loss_by_context`: see `Tally`.
    """
    tally = Tally(corpus.stream, corpus.eos_token_id, corpus.unigram_nats, bands)
    started = time.perf_counter()
    rows = reading.rows(corpus.stream)
    for scored in walk(model, corpus.stream, rows, corpus.prefix_id, batch_size):
        tally.add(scored)
    seconds = time.perf_counter() - started
    interval = tally.interval()
    result = corpus.named | {
        "window_tokens": reading.window_tokens,
        "stride_tokens": reading.stride,
        "state": reading.policy,
        "tokens": tally.tokens,
        "documents": len(corpus.stream.document_ends),
        "utf8_bytes": corpus.utf8_bytes,
        "nats_per_token": tally.nats_per_token,
        "nats_per_token_interval": interval,
        "perplexity": perplexity_of(tally.nats_per_token),
        "perplexity_interval": interval and [perplexity_of(x) for x in interval],
        "bits_per_byte": bits_per_byte(tally.text_nats, corpus.utf8_bytes),
        "loss_by_context": tally.by_context(),
        "seconds": round(seconds, 3),
        "tokens_per_s": tally.tokens / seconds,
    }
    if corpus.unigram_nats is not None:
        unigram = bits_per_byte(tally.unigram_text_nats, corpus.utf8_bytes)
        result["unigram_bits_per_byte"] = unigram
    return result
