"""LAMBADA: predict the last word of a passage, scored by two protocols under their own names.

l_ij is the log-probability of sub-word j of the last word of passage i, which has n_i of them; P is
the number of passages.

- `paper`: accuracy = share of passages whose first sub-word is the most likely token;
  perplexity = exp(-sum_ij l_ij / sum_i n_i), per sub-word.
- `lm_eval` (lm-evaluation-harness, lambada_openai): accuracy = share of passages whose sub-words
  all are the most likely token; perplexity = exp(-sum_ij l_ij / P), per word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.errors import UserError
from groundlm.evaluation.continuations import score_continuations
from groundlm.evaluation.scoring import context_limit, vocabulary_rows
from groundlm.evaluation.tally import perplexity_of
from groundlm.evaluation.text import TextEncoder

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE_ENDINGS = {".jsonl", ".json", ".txt", ".csv", ".parquet", ".gz"}
"""What no data set on the hub is called."""


def score_lambada(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    items: Sequence[str],
    batch_size: int = 16,
    limit_tokens: int | None = None,
) -> dict[str, Any]:
    """Score passages by both protocols.

    Args:
        items: passages whose last word is to be predicted.
        batch_size: passages of similar length read side by side; it changes the result by rounding
            only.
        limit_tokens: read at most so many tokens of a passage, its end. None: the model's own
            limit, which a recurrent model does not have.

    Returns:
        `paper` and `lm_eval` (each `accuracy` and `perplexity`), `passages`, `subwords`,
        `truncated` (passages read in part), `limit_tokens`, `prefix`, and `items`: for each passage
        `index`, `target`, `subwords`, `context_tokens`, `log_likelihood` (nats, of the whole word),
        `first_is_top`, `all_are_top`, `truncated`.

    Raises:
        UserError: no passage, or one without a word.
    """
    if not items:
        raise UserError("there is no LAMBADA passage to score")
    encoder = TextEncoder(tokenizer, vocabulary_rows(model))
    limit = context_limit(model) if limit_tokens is None else limit_tokens
    words = [split_last_word(text, index) for index, text in enumerate(items)]
    pairs = [encoder.encode_pair(context, target) for context, target in words]
    scored = score_continuations(model, pairs, batch_size, limit)
    rows: list[dict[str, Any]] = [
        {
            "index": index,
            "target": target.strip(),
            "subwords": len(result.nats),
            "context_tokens": len(context_ids),
            "log_likelihood": result.log_likelihood,
            "first_is_top": bool(result.is_top[0]),
            "all_are_top": bool(result.is_top.all()),
            "truncated": result.truncated,
        }
        for index, ((_, target), (context_ids, _), result) in enumerate(
            zip(words, pairs, scored, strict=True)
        )
    ]
    nats = float(np.concatenate([result.nats for result in scored]).sum())
    if not np.isfinite(nats):
        raise UserError("scores of the model are not finite")
    subwords = sum(row["subwords"] for row in rows)
    return {
        "passages": len(rows),
        "subwords": subwords,
        "paper": {
            "accuracy": sum(row["first_is_top"] for row in rows) / len(rows),
            "perplexity": perplexity_of(nats / subwords),
        },
        "lm_eval": {
            "accuracy": sum(row["all_are_top"] for row in rows) / len(rows),
            "perplexity": perplexity_of(nats / len(rows)),
        },
        "truncated": sum(row["truncated"] for row in rows),
        "limit_tokens": limit,
        "prefix": encoder.policy,
        "items": rows,
    }


def split_last_word(text: str, index: int = 0) -> tuple[str, str]:
    """A passage as context and target: the last word with one space before it.

    As in lm-evaluation-harness, a word is what stands between spaces, and a passage of one word has
    an empty context. White space after the last word is dropped first. Raises `UserError` with the
    passage's index if there is no word.
    """
    context, _, word = text.rstrip().rpartition(" ")
    if not word:
        raise UserError(f"LAMBADA passage {index} has no word")
    return context, f" {word}"


def read_passages(source: str) -> list[str]:
    """Passages of a JSONL file (field `text`), or of the test split of a hub data set.

    Raises `UserError` naming the file and line, or the data set, that cannot be read.
    """
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    if not HUB_NAME.fullmatch(source) or Path(source).suffix.lower() in FILE_ENDINGS:
        raise UserError(f"LAMBADA file {source} does not exist")
    import datasets

    try:
        rows = datasets.load_dataset(source, split="test")
        return [str(text) for text in rows["text"]]
    except Exception as error:  # the hub client and the readers raise many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"LAMBADA data set {source} cannot be loaded: {reason}") from None


def _read_file(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"LAMBADA file {path} cannot be read: {error}") from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UserError(f"{path} line {number} is no JSON object with a text `text`")
        texts.append(text)
    if not texts:
        raise UserError(f"LAMBADA file {path} holds no passage")
    return texts
