"""The held-out text that an analysis reads, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.data.integrity import file_sha256
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
    """Tokens to read."""

    stream: TokenStream
    data: str | None
    """Folder of the token files; None for a plain text."""
    named: dict[str, Any]
    """Where the text is from, with the SHA-256 of its content."""

    def train_counts(self) -> np.ndarray | None:
        """Occurrences of each id in the train split, int64 [W]; None for a plain text."""
        return None if self.data is None else TokenSplit.open(self.data, "train").unigram_counts()


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
        ids = corpus.stream.read(0, corpus.stream.tokens)
        return Source(
            corpus.stream, None, {"text": text, "sha256": sha256(ids.tobytes()).hexdigest()}
        )
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
    named = {"data": data, "split": "heldout", "sha256": split.info.content_sha256()}
    return Source(split, data, named)


def weights_sha256(folder: str) -> str:
    """One fingerprint of all weight files of a model folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    text = " ".join(f"{path.name} {file_sha256(path)}" for path in files)
    return sha256(text.encode()).hexdigest()


def dtype_name(model: PreTrainedModel) -> str:
    """Dtype of the weights, as `--dtype` names it."""
    return str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")


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
