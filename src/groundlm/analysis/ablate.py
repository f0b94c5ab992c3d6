"""`groundlm ablate`: what each part of a GPN is worth, in nats per token and in LAMBADA."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from groundlm.analysis.changes import known_changes
from groundlm.analysis.collect import sample_windows
from groundlm.analysis.report import ABLATION_NAME, STATS_NAME, check_out, write_report
from groundlm.analysis.source import (
    Source,
    default_out,
    dtype_name,
    open_source,
    weights_sha256,
)
from groundlm.analysis.taps import require_gpn
from groundlm.data.tokenizer import load_tokenizer
from groundlm.errors import UserError
from groundlm.evaluation.lambada import read_passages, score_lambada
from groundlm.evaluation.record import git_commit, make_folder_of, trained_with, write_json
from groundlm.evaluation.scoring import evaluating, token_nats
from groundlm.evaluation.tally import bootstrap, context_bands
from groundlm.model.loading import load_model
from groundlm.models import resolve_device, versions

DEFAULT_WINDOW_TOKENS, LONGEST = 256, 512
DIGITS = 6
TOPS = {"paper": "first_is_top", "lm_eval": "all_are_top"}
"""What counts as right in an item of LAMBADA, by protocol."""


@dataclass(frozen=True)
class AblateConfig:
    """Score a GPN with one part changed at a time, on the same windows of held-out text.

    Prints a table and, as the last line, the result as JSON. docs/analysis.md defines each change.
    """

    model: str
    """Model folder: a checkpoint, or anything that `save_pretrained` wrote with its tokenizer."""
    data: str | None = None
    """Folder written by `groundlm prepare` with the model's tokenizer."""
    text: str | None = None
    """Read this file of plain text (UTF-8) instead."""
    lambada: str | None = None
    """Also score LAMBADA passages: a JSONL file with the field `text`, or a data set on the hub."""
    lambada_passages: int = 200
    """Take the first so many passages; 0 takes all."""
    only: list[str] | None = None
    """Only interventions of these names; wildcards are allowed (`head_*`). None: all."""
    tokens: int = 8192
    """Tokens scored."""
    window_tokens: int | None = None
    """Tokens per window, each read from the zero state. None: the window the model was trained \
with, at most 512, else 256."""
    after_tokens: int = 64
    """Writing ends, or the memory is frozen or swapped, after so many tokens of a window."""
    resets: tuple[int, ...] = (8, 32, 128)
    """Reset the state every so many tokens."""
    batch_size: int = 32
    """Windows or passages read side by side; it changes the figures by rounding only."""
    out: str | None = None
    """Folder for ablate.json; a report of `groundlm analyze` there is drawn anew with it. None: \
`analysis/` of the run that the model is a checkpoint of."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` takes a GPU if there is one."""
    dtype: str = "float32"
    """Dtype of the weights: `float32`, `bfloat16`, or `auto` (as on disk)."""


def run_ablate(config: AblateConfig) -> dict[str, Any]:
    """`ablate`, then write ablate.json, print a table and, as the last line, the result as JSON."""
    out = default_out(config.out, config.model)
    check_out(out)
    result = ablate(config, partial(make_folder_of, out / ABLATION_NAME))
    write_json(out / ABLATION_NAME, result)
    if (out / STATS_NAME).is_file():
        write_report(out)
    Console().print(_table(result))
    print(json.dumps(result))
    return result


def ablate(config: AblateConfig, once_checked: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Score the model as it is and under every intervention, on the same windows.

    `once_checked` is called when all inputs are open and fit, before the work.

    Raises:
        UserError: a model that is no GPN, text of fewer than 2 tokens, names that match nothing.
    """
    _check(config)
    passages = None if config.lambada is None else read_passages(config.lambada)
    if passages is not None and config.lambada_passages:
        passages = passages[: config.lambada_passages]
    model = load_model(config.model, config.dtype, resolve_device(config.device))
    require_gpn(model)
    tokenizer = load_tokenizer(config.model)
    source = open_source(config.data, config.text, model, tokenizer, config.model)
    ids_NT = _windows(source, config)
    changes = known_changes(model, ids_NT, config.after_tokens, config.resets, config.batch_size)
    chosen = [c for c in changes if _wanted(c.name, config.only)]
    if not chosen:
        names = ", ".join(c.name for c in changes)
        raise UserError(f"--only {' '.join(config.only or [])} matches none of {names}")
    once_checked()

    def lambada() -> dict[str, Any] | None:
        if passages is None:
            return None
        return score_lambada(model, tokenizer, passages, config.batch_size)

    base_NT = window_nats(model, ids_NT, config.batch_size)
    base_lambada = lambada()
    rows = []
    for change in chosen:
        with change.enter():
            nats_NT = window_nats(model, ids_NT, config.batch_size)
            scores = lambada()
        row: dict[str, Any] = {"name": change.name, "what": change.what}
        row |= paired(nats_NT, base_NT, change.first, change.period)
        if scores is not None and base_lambada is not None:
            row["lambada"] = paired_lambada(scores, base_lambada)
        rows.append(row)
    result = {
        "model": config.model,
        "weights_sha256": weights_sha256(config.model),
        "dtype": dtype_name(model),
        "source": source.named,
        "windows": int(base_NT.shape[0]),
        "tokens": int(base_NT.size),
        "window_tokens": int(base_NT.shape[1]),
        "nats_per_token": round(float(base_NT.mean()), DIGITS),
        "interventions": rows,
        "left_out": _left_out(config, ids_NT.shape[1] - 1),
        "versions": versions(),
        "commit": git_commit(),
    }
    if base_lambada is not None and passages is not None:
        kept = {protocol: base_lambada[protocol] for protocol in TOPS}
        result["lambada"] = {"source": config.lambada, "passages": len(passages)} | kept
    return result


def _check(config: AblateConfig) -> None:
    for name in ("tokens", "window_tokens", "batch_size"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    for name in ("after_tokens", "lambada_passages"):
        if getattr(config, name) < 0:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} is {getattr(config, name)}: it must be at least 0")
    if bad := [n for n in config.resets if n < 1]:
        raise UserError(f"--resets has {bad[0]}: a reset comes every 1 or more tokens")


def _left_out(config: AblateConfig, window: int) -> dict[str, str]:
    """What could not act in the windows, and why."""
    reason = f"the windows of {window} tokens are too short"
    left_out = {f"reset_every_{n}": reason for n in config.resets if n >= window}
    if config.after_tokens >= window:
        left_out[f"after {config.after_tokens} tokens"] = reason
    return left_out


def window_nats(model: PreTrainedModel, ids_NT: np.ndarray, batch_size: int) -> np.ndarray:
    """Nats of the tokens of each window after its first, float64 [N, T - 1].

    Raises `UserError` if one is not finite.
    """
    parts = []
    with evaluating(model):
        for first in range(0, len(ids_NT), batch_size):
            ids_BT = torch.from_numpy(ids_NT[first : first + batch_size]).to(model.device)
            nats_BT = token_nats(model, ids_BT[:, :-1], ids_BT[:, 1:])
            parts.append(nats_BT.double().cpu().numpy())
    nats_NT = np.concatenate(parts)
    if not np.isfinite(nats_NT).all():
        raise UserError(f"{(~np.isfinite(nats_NT)).sum()} scores of the model are not finite")
    return nats_NT


def paired(
    nats_NT: np.ndarray, base_NT: np.ndarray, first: int = 0, period: int | None = None
) -> dict[str, Any]:
    """Change in nats per token against the unchanged model on the same tokens.

    `interval` is a 95 % bootstrap over windows of the paired difference; None for one window. A
    change that begins at some token counts from the target that it can reach `first` on, and its
    `by_tokens_since` tells the change by the tokens read since (every `period` tokens anew).
    """
    change_NT = (nats_NT - base_NT)[:, first:]
    figures = {"nats_per_token": round(float(nats_NT[:, first:].mean()), DIGITS)}
    figures |= _mean_change(change_NT)
    if not first and period is None:
        return figures
    since_T = np.arange(change_NT.shape[1]) % (period or change_NT.shape[1]) + 1
    bands = [int(b) for b in context_bands(int(since_T.max())) if b <= since_T.max()]
    ends = [*(b - 1 for b in bands[1:]), int(since_T.max())]
    return figures | {
        "from_token": first,
        "by_tokens_since": [
            {"from": low, "to": high}
            | _mean_change(change_NT[:, (since_T >= low) & (since_T <= high)])
            for low, high in zip(bands, ends, strict=True)
        ],
    }


def paired_lambada(scores: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """By protocol `accuracy` and `perplexity`, and their changes against the unchanged model.

    The changes are paired: `accuracy_change`, and `change_nats` per sub-word (`paper`) or per word
    (`lm_eval`), each with a 95 % bootstrap interval over passages (None for one passage).
    """
    found = {}
    for protocol, top in TOPS.items():
        pairs = list(zip(scores["items"], base["items"], strict=True))
        right_N = np.array([float(a[top]) - float(b[top]) for a, b in pairs])
        nats_N = np.array([b["log_likelihood"] - a["log_likelihood"] for a, b in pairs])
        words_N = np.ones(len(pairs))
        counts_N = np.array([a["subwords"] for a, _ in pairs]) if protocol == "paper" else words_N
        found[protocol] = {
            **scores[protocol],
            "accuracy_change": round(float(right_N.mean()), DIGITS),
            "accuracy_interval": _interval(right_N, words_N),
            "change_nats": round(float(nats_N.sum() / counts_N.sum()), DIGITS),
            "interval": _interval(nats_N, counts_N),
        }
    return found


def _mean_change(change_NT: np.ndarray) -> dict[str, Any]:
    change_N = change_NT.sum(1)
    counts_N = np.full(len(change_N), float(change_NT.shape[1]))
    return {
        "change_nats": round(float(change_NT.mean()), DIGITS),
        "interval": _interval(change_N, counts_N),
    }


def _interval(sums_N: np.ndarray, counts_N: np.ndarray) -> list[float] | None:
    interval = bootstrap(sums_N, counts_N)
    return interval and [round(x, DIGITS) for x in interval]


def _windows(source: Source, config: AblateConfig) -> np.ndarray:
    """Windows of one token more than is scored, int64 [N, T + 1]."""
    if source.stream.tokens < 2:
        raise UserError(f"the text has {source.stream.tokens} token: scoring needs at least 2")
    window = config.window_tokens
    if window is None:
        trained = trained_with(config.model, "data.window_tokens", int)
        window = min(trained, LONGEST) if trained and trained > 0 else DEFAULT_WINDOW_TOKENS
    length = min(window + 1, source.stream.tokens)
    return sample_windows(source.stream, -(-config.tokens // (length - 1)) * length, length)


def _wanted(name: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _table(result: dict[str, Any]) -> Table:
    base = result["nats_per_token"]
    table = Table(title=f"{base:.4f} nats per token over {result['tokens']:,}; changes:")
    table.add_column("intervention", no_wrap=True)
    table.add_column("change, nats (95 %)", justify="right")
    with_lambada = "lambada" in result
    if with_lambada:
        table.add_column("LAMBADA acc.", justify="right")
        table.add_column("nats per sub-word", justify="right")
    for row in result["interventions"]:
        cells = [row["name"], _signed(row, "change_nats", "interval", 4)]
        if with_lambada:
            paper = row["lambada"]["paper"]
            cells += [
                _signed(paper, "accuracy_change", "accuracy_interval", 3),
                _signed(paper, "change_nats", "interval", 3),
            ]
        table.add_row(*cells)
    return table


def _signed(row: dict[str, Any], value: str, interval: str, digits: int) -> str:
    """A change with its interval."""
    text = f"{row[value]:+.{digits}f}"
    if row[interval] is None:
        return text
    low, high = row[interval]
    return f"{text} ({low:+.{digits}f} .. {high:+.{digits}f})"
