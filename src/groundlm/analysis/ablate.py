"""`groundlm ablate`: what each part of a GPN is worth, in nats per token and in LAMBADA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from groundlm.analysis.changes import known_changes
from groundlm.analysis.collect import sample_windows
from groundlm.analysis.report import write_report
from groundlm.analysis.source import Source, default_out, open_source
from groundlm.analysis.taps import require_gpn
from groundlm.data.tokenizer import load_tokenizer
from groundlm.errors import UserError
from groundlm.evaluation.lambada import read_passages, score_lambada
from groundlm.evaluation.record import make_folder_of, write_json
from groundlm.evaluation.scoring import evaluating, token_nats
from groundlm.evaluation.tally import bootstrap, context_bands
from groundlm.model.loading import load_model
from groundlm.models import resolve_device, versions


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
    window_tokens: int = 256
    """Tokens per window, each read from the zero state."""
    after_tokens: int = 64
    """The memory is frozen, or swapped, after so many tokens of a window."""
    resets: tuple[int, ...] = (8, 32, 128)
    """Reset the state every so many tokens."""
    batch_size: int = 32
    """Windows read side by side; swapped memories come from the same batch."""
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
    make_folder_of(out / "ablate.json")
    result = ablate(config)
    write_json(out / "ablate.json", result)
    if (out / "stats.json").is_file():
        write_report(out)
    Console().print(_table(result))
    print(json.dumps(result))
    return result


def ablate(config: AblateConfig) -> dict[str, Any]:
    """Score the model as it is and under every intervention, on the same windows.

    Raises:
        UserError: a model that is no GPN, text of fewer than 2 tokens, names that match nothing.
    """
    if min(config.tokens, config.window_tokens, config.batch_size) < 1 or config.after_tokens < 0:
        raise UserError("--tokens, --window-tokens and --batch-size must be at least 1, "
                        "--after-tokens at least 0")  # fmt: skip
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

    def lambada() -> dict[str, Any] | None:
        if passages is None:
            return None
        scores = score_lambada(model, tokenizer, passages, config.batch_size)
        return {name: scores[name] for name in ("paper", "lm_eval")}

    base_NT = window_nats(model, ids_NT, config.batch_size)
    base_lambada = lambada()
    rows = []
    for change in chosen:
        with change.enter():
            nats_NT = window_nats(model, ids_NT, config.batch_size)
            scores = lambada()
        row = {"name": change.name, "what": change.what} | paired(nats_NT, base_NT)
        rows.append(row if scores is None else row | {"lambada": scores})
    result = {
        "model": config.model,
        "dtype": config.dtype,
        "source": source.named,
        "windows": int(base_NT.shape[0]),
        "tokens": int(base_NT.size),
        "window_tokens": int(base_NT.shape[1]),
        "nats_per_token": round(float(base_NT.mean()), 6),
        "loss_by_context": loss_by_context(base_NT),
        "interventions": rows,
        "versions": versions(),
    }
    if base_lambada is not None and passages is not None:
        result["lambada"] = {"source": config.lambada, "passages": len(passages)} | base_lambada
    return result


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


def paired(nats_NT: np.ndarray, base_NT: np.ndarray) -> dict[str, Any]:
    """Change in nats per token against the unchanged model on the same tokens.

    `interval` is a 95 % bootstrap over windows of the paired difference; None for one window.
    """
    change_N = (nats_NT - base_NT).sum(1)
    counts_N = np.full(len(change_N), float(base_NT.shape[1]))
    interval = bootstrap(change_N, counts_N)
    return {
        "nats_per_token": round(float(nats_NT.mean()), 6),
        "change_nats": round(float(change_N.sum() / counts_N.sum()), 6),
        "interval": interval and [round(x, 6) for x in interval],
    }


def loss_by_context(nats_NT: np.ndarray) -> list[dict[str, Any]]:
    """Mean nats by the number of tokens read since the zero state, in bands."""
    bands = [int(b) for b in context_bands(nats_NT.shape[1]) if b <= nats_NT.shape[1]]
    ends = [*(b - 1 for b in bands[1:]), nats_NT.shape[1]]
    return [
        {"from": low, "to": high, "nats": round(float(nats_NT[:, low - 1 : high].mean()), 6)}
        for low, high in zip(bands, ends, strict=True)
    ]


def _windows(source: Source, config: AblateConfig) -> np.ndarray:
    """Windows of one token more than is scored, int64 [N, T + 1]."""
    if source.stream.tokens < 2:
        raise UserError(f"the text has {source.stream.tokens} token: scoring needs at least 2")
    length = min(config.window_tokens + 1, source.stream.tokens)
    return sample_windows(source.stream, -(-config.tokens // (length - 1)) * length, length)


def _wanted(name: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _table(result: dict[str, Any]) -> Table:
    base = result["nats_per_token"]
    table = Table(title=f"{result['model']}: {base:.4f} nats per token over {result['tokens']:,}")
    table.add_column("intervention", no_wrap=True)
    table.add_column("change, nats", justify="right")
    table.add_column("95 % interval", justify="right")
    with_lambada = "lambada" in result
    if with_lambada:
        table.add_column("LAMBADA acc., PPL", justify="right")
    for row in result["interventions"]:
        interval = row["interval"]
        cells = [
            row["name"],
            f"{row['change_nats']:+.4f}",
            "" if interval is None else f"{interval[0]:+.4f} .. {interval[1]:+.4f}",
        ]
        if with_lambada:
            paper = row["lambada"]["paper"]
            cells.append(f"{paper['accuracy']:.3f}, {paper['perplexity'] or float('inf'):.1f}")
        table.add_row(*cells)
    return table
