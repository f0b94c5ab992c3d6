"""`groundlm analyze`: every analysis of the paper for one model, as JSON, plots and a report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.analysis.collect import collect, sample_windows
from groundlm.analysis.example import example
from groundlm.analysis.report import STATS_NAME, check_out, write_report
from groundlm.analysis.source import default_out, dtype_name, open_source, weights_sha256
from groundlm.analysis.stats import rounded, state_statistics
from groundlm.data.tokenizer import load_tokenizer, vocabulary_size
from groundlm.errors import UserError
from groundlm.evaluation.record import git_commit, make_folder_of, write_json
from groundlm.evaluation.scoring import check_scorable, vocabulary_rows
from groundlm.model.loading import load_model
from groundlm.model.modeling import GPNForCausalLM
from groundlm.models import resolve_device, versions


@dataclass(frozen=True)
class AnalyzeConfig:
    """Read what a model's state and memory hold from one pass over held-out text.

    Writes stats.json, plots (PNG) and report.html, and prints where they are. docs/analysis.md
    defines each figure.
    """

    model: str
    """Model folder: a checkpoint, or anything that `save_pretrained` wrote with its tokenizer."""
    data: str | None = None
    """Folder written by `groundlm prepare` with the model's tokenizer; the held-out split \
is read."""
    text: str | None = None
    """Read this file of plain text (UTF-8) instead."""
    out: str | None = None
    """Folder of the results. None: `analysis/` of the run that the model is a checkpoint of."""
    against: str | None = None
    """A second model, as a rule the same with a decoder bias: its mean state is set beside."""
    states: int = 16384
    """States taken, at most."""
    window_tokens: int = 2048
    """Tokens of a window, each read from the zero state; bounds the lags."""
    example_tokens: int = 48
    """Tokens of the example that is shown token by token; 0 shows none."""
    batch_size: int = 4
    """Windows read side by side; it changes the figures by rounding only."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` takes a GPU if there is one."""
    dtype: str = "float32"
    """Dtype of the weights: `float32`, `bfloat16`, or `auto` (as on disk)."""


def run_analyze(config: AnalyzeConfig) -> dict[str, Any]:
    """`analyze`, then write the results; the last line of stdout names them as JSON."""
    out = default_out(config.out, config.model)
    check_out(out)
    stats = analyze(config, partial(make_folder_of, out / STATS_NAME))
    write_json(out / STATS_NAME, stats)
    report = write_report(out)
    paths = {"report": str(report), "stats": str(out / STATS_NAME)}
    print(json.dumps(paths))
    return paths


def analyze(
    config: AnalyzeConfig, once_checked: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Everything that stats.json holds, for one model.

    `once_checked` is called when all inputs are open and fit, before the work.

    Raises:
        UserError: a model, text or number that does not fit, states that are not finite.
    """
    if config.batch_size < 1 or config.example_tokens < 0:
        raise UserError("--batch-size must be at least 1, --example-tokens at least 0")
    model = load_model(config.model, config.dtype, resolve_device(config.device))
    check_scorable(model)
    tokenizer = load_tokenizer(config.model)
    source = open_source(config.data, config.text, model, tokenizer, config.model)
    ids_NT = sample_windows(source.stream, config.states, config.window_tokens)
    second = None if config.against is None else _second_model(config, model)
    once_checked()
    seen = collect(model, ids_NT, config.batch_size)
    other = None if second is None else collect(second, ids_NT, config.batch_size)
    counts = source.train_counts()
    stats = state_statistics(model, seen, vocabulary_size(tokenizer), counts, other)
    _name_tokens(stats, tokenizer)
    shown = None
    if isinstance(model, GPNForCausalLM) and config.example_tokens:
        shown = rounded(example(model, tokenizer, ids_NT[0, : config.example_tokens]))
    return {
        "model": config.model,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_sha256": weights_sha256(config.model),
        "dtype": dtype_name(model),
        "source": source.named,
        "windows": ids_NT.shape[0],
        "window_tokens": ids_NT.shape[1],
        "states": ids_NT.size,
        **stats,
        "example": shown,
        "versions": versions(),
        "commit": git_commit(),
    }


def _second_model(config: AnalyzeConfig, model: PreTrainedModel) -> PreTrainedModel:
    other = load_model(str(config.against), config.dtype, resolve_device(config.device))
    have, want = vocabulary_rows(other), vocabulary_rows(model)
    if have != want:
        raise UserError(
            f"{config.against} has a vocabulary of {have:,}, {config.model} of {want:,}"
        )
    return other


def _name_tokens(stats: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Put the text of tokens beside their ids."""
    for name in ("mean_decoded", "mean_embedding"):
        if name in stats["figures"]:
            values = stats["figures"][name]["values"]
            values["top_tokens"] = [tokenizer.decode([i]) for i in values["top_ids"]]
    stats["curves"]["decoded"]["tokens"] = stats["figures"]["mean_decoded"]["values"]["top_tokens"]
