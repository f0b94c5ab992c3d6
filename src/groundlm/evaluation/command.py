"""`groundlm eval`: the scores of one model on token files, a text or LAMBADA."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.data.tokenizer import load_tokenizer, tokenizer_sha256
from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError
from groundlm.evaluation import record
from groundlm.evaluation.corpus import score_corpus, split_corpus, text_corpus
from groundlm.evaluation.lambada import read_passages, score_lambada
from groundlm.evaluation.reading import Reading
from groundlm.evaluation.scoring import check_scorable, context_limit, vocabulary_rows
from groundlm.evaluation.table import result_table
from groundlm.evaluation.text import TextEncoder
from groundlm.model.loading import load_model
from groundlm.models import resolve_device, versions

DEFAULT_WINDOW_TOKENS = 2048


@dataclass(frozen=True)
class EvalConfig:
    """Score a model: perplexity and bits per byte of token files or a text, and LAMBADA.

    Prints a table and, as the last line, the result as JSON. docs/evaluation.md defines each score.
    """

    model: str
    """Model folder: a checkpoint, or anything that `save_pretrained` wrote with its tokenizer."""
    data: str | None = None
    """Folder written by `groundlm prepare` with the model's tokenizer."""
    split: str = "heldout"
    """Split of `data` to score: `heldout` or `train`."""
    text: str | None = None
    """Score this file of plain text (UTF-8) instead, as one document."""
    lambada: str | None = None
    """LAMBADA passages: a JSONL file with the field `text`, or a data set on the hub \
(EleutherAI/lambada_openai)."""
    window_tokens: int | None = None
    """Tokens per window. None: the window the model was trained with, else 2048 or the model's \
limit."""
    stride_tokens: int | None = None
    """Tokens from one window to the next; the overlap is read again but scored once. None: the \
window, so no overlap."""
    state: Literal["reset", "carry"] = "reset"
    """State at the start of a window: zero, or carried over from the window before (recurrent \
models; one window after the other, so slower)."""
    whole_documents: bool = False
    """Read every document by itself from its first token to its last (recurrent models)."""
    reset_at_documents: bool | None = None
    """Start from the zero state at every document within a window, too (GPN). None: as the model \
was trained."""
    limit_tokens: int | None = None
    """LAMBADA: read at most so many tokens of a passage. None: the model's own limit; a recurrent \
model has none."""
    batch_size: int = 16
    """Windows or passages read side by side; it changes the result by rounding only."""
    out: str | None = None
    """Also write the result to this file, as JSON."""
    items_out: str | None = None
    """Write LAMBADA's per-passage results here, as JSON lines. None: beside `out`, else to \
`eval/` of the run that the model is a checkpoint of."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` takes a GPU if there is one."""
    dtype: str = "float32"
    """Dtype of the weights: `float32`, `bfloat16`, or `auto` (as on disk)."""


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """`evaluate`, then print a table and, as the last line of stdout, the result as JSON."""
    result = evaluate(config)
    Console().print(result_table(result))
    print(json.dumps(result))
    return result


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Score a model and write the files that were asked for; returns the result.

    Raises:
        UserError: a model, split, text, window or file that does not fit.
    """
    _check(config)
    split = None if config.data is None else TokenSplit.open(config.data, config.split)
    passages = None if config.lambada is None else read_passages(config.lambada)
    model = load_model(config.model, config.dtype, resolve_device(config.device))
    check_scorable(model)
    tokenizer = load_tokenizer(config.model)
    encoder = TextEncoder(tokenizer, vocabulary_rows(model))
    tokenizer_sha = tokenizer_sha256(tokenizer)
    corpus = None
    if split is not None:
        _check_fit(config, split, tokenizer_sha, vocabulary_rows(model))
        corpus = split_corpus(split, config.data, config.split)
    elif config.text is not None:
        corpus = text_corpus(config.text, encoder)
    reading = _reading(config, model)
    out, items_out = _result_files(config)
    result: dict[str, Any] = {
        "model": config.model,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": config.dtype,
        "device": str(model.device),
        "tokenizer_sha256": tokenizer_sha,
        "prefix": encoder.policy,
    }
    if corpus is not None:
        result |= score_corpus(model, corpus, reading, config.batch_size)
    items = None
    if passages is not None:
        result["lambada"], items = _lambada(config, model, tokenizer, passages, items_out)
    result |= {"versions": versions(), "commit": record.git_commit()}
    if items_out is not None and items is not None:
        record.write_json_lines(items_out, items)
    if out is not None:
        record.write_json(out, result)
    return result


def _check(config: EvalConfig) -> None:
    if config.batch_size < 1:
        raise UserError(f"--batch-size is {config.batch_size}: it must be at least 1")
    if config.data is not None and config.text is not None:
        raise UserError("--data and --text are both given: score one at a time")
    if config.data is None and config.text is None and config.lambada is None:
        raise UserError("nothing to score: give --data, --text or --lambada")
    for name in ("limit_tokens", "items_out"):
        if config.lambada is None and getattr(config, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is for LAMBADA: give --lambada")
    if config.limit_tokens is not None and config.limit_tokens < 1:
        raise UserError(f"--limit-tokens is {config.limit_tokens}: it must be at least 1")
    window = 1 if config.window_tokens is None else config.window_tokens
    if window < 1:
        raise UserError(f"--window-tokens is {window}: it must be at least 1")


def _result_files(config: EvalConfig) -> tuple[Path | None, Path | None]:
    """Where the result and LAMBADA's items go, made sure of before anything is scored."""
    out = None if config.out is None else Path(config.out)
    items = None if config.items_out is None else Path(config.items_out)
    run = record.run_folder(config.model)
    if items is None and config.lambada is not None:
        if out is not None:
            items = out.with_name(f"{out.stem}.lambada.jsonl")
        elif run is not None and run.is_dir():
            items = run / "eval" / f"{Path(config.model).resolve().name}.lambada.jsonl"
    if out is not None and items is not None and out.resolve() == items.resolve():
        raise UserError(f"--out and --items-out are both {out}: name two files")
    for path in (out, items):
        if path is not None:
            record.make_folder_of(path)
    return out, items


def _reading(config: EvalConfig, model: PreTrainedModel) -> Reading:
    window = config.window_tokens
    if window is None:
        limit = context_limit(model) or DEFAULT_WINDOW_TOKENS
        trained = record.trained_with(config.model, "data.window_tokens", int) or 0
        window = trained if trained > 0 else min(DEFAULT_WINDOW_TOKENS, limit)
    resets = config.reset_at_documents
    if resets is None:
        resets = record.trained_with(config.model, "data.reset_at_documents", bool) or False
    reading = Reading(window, config.stride_tokens, config.state, config.whole_documents, resets)
    reading.check(model)
    return reading


def _check_fit(config: EvalConfig, split: TokenSplit, tokenizer_sha: str, rows: int) -> None:
    theirs = split.manifest.tokenizer.sha256
    if tokenizer_sha != theirs:
        raise UserError(
            f"the tokenizer of {config.model} (sha256 {tokenizer_sha[:12]}) is not the one that "
            f"made the token files ({theirs[:12]})"
        )
    if split.vocab_size > rows:
        raise UserError(
            f"the token files have a vocabulary of {split.vocab_size:,}, the model of {rows:,}"
        )


def _lambada(
    config: EvalConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    passages: list[str],
    items_out: Path | None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    started = time.perf_counter()
    scores = score_lambada(model, tokenizer, passages, config.batch_size, config.limit_tokens)
    items = scores.pop("items")
    named = {"source": config.lambada, "items": None if items_out is None else str(items_out)}
    return named | scores | {"seconds": round(time.perf_counter() - started, 3)}, items
