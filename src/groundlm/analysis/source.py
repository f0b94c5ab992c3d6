"""The held-out text that an analysis reads, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.data.tokenizer import tokenizer_sha256
from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError
from groundlm.evaluation.corpus import text_corpus
from groundlm.evaluation.reading import TokenStream
from groundlm.evaluation.record import run_folder
from groundlm.evaluation.scoring import vocabulary_rows
from groundlm.evaluation.text import TextEncoder


@dataclass(frozen=True)
class Source:
    """Tokens to read; `train_counts` [W] of the train split, None for a plain text."""

    stream: TokenStream
    train_counts: np.ndarray | None
    named: dict[str, Any]


def open_source(
    data: str | None,
    text: str | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: str,
) -> Source:
    """The held-out split of a folder of token files, or a text file.

    Raises `UserError` unless exactly one is given and it fits the model and its tokenizer.
    """
    if (data is None) == (text is None):
        raise UserError("give exactly one of --data and --text")
    rows = vocabulary_rows(model)
    if data is None:
        assert text is not None
        corpus = text_corpus(text, TextEncoder(tokenizer, rows))
        return Source(corpus.stream, None, {"text": text})
    split = TokenSplit.open(data, "heldout")
    have, want = tokenizer_sha256(tokenizer), split.manifest.tokenizer.sha256
    if have != want:
        raise UserError(
            f"the tokenizer of {folder} (sha256 {have[:12]}) is not the one that made the token "
            f"files ({want[:12]})"
        )
    if split.vocab_size > rows:
        raise UserError(
            f"the token files have a vocabulary of {split.vocab_size:,}, the model of {rows:,}"
        )
    counts = TokenSplit.open(data, "train").unigram_counts()
    return Source(split, counts, {"data": data, "split": "heldout"})


def default_out(out: str | None, model: str) -> Path:
    """The folder named, or `analysis/<checkpoint>` of the run that the model is a checkpoint of.

    Raises `UserError` if there is neither.
    """
    if out is not None:
        return Path(out)
    run = run_folder(model)
    if run is None:
        raise UserError(f"{model} is no checkpoint of a run: say with --out where the results go")
    return run / "analysis" / Path(model).resolve().name
