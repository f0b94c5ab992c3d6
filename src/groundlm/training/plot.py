"""`groundlm plot`: curves of one or several runs as a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundlm.errors import UserError

PANELS = (
    ("loss", "nats per token", ("loss_nats", "heldout_nats_per_token")),
    ("learning rate", "", ("learning_rate",)),
    ("gradient norm", "", ("grad_norm",)),
    ("state norm", "", ("state_norm",)),
    ("mean retention", "", ("mean_retention",)),
    ("memory effect", "|read| / |rest|", ("memory_effect",)),
)
SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class PlotConfig:
    """Draw loss, learning rate and norms of training runs over the tokens read."""

    run: list[str]
    """Folders of the runs, each with its metrics.jsonl."""
    out: str = "runs.png"
    """Picture to write: .png, .svg or .pdf."""
    smooth: int = 1
    """Average the training loss over so many records."""
    log_scale: bool = False
    """Draw tokens on a logarithmic axis."""


def run_plot(config: PlotConfig) -> None:
    """Write the picture and name it; panels that no run has figures for are left out.

    Raises `UserError` for runs without metrics, an unknown format, a file that cannot be written.
    """
    if not config.run:
        raise UserError("--run names nothing")
    if config.smooth < 1:
        raise UserError(f"--smooth is {config.smooth}: it must be at least 1")
    if Path(config.out).suffix not in SUFFIXES:
        raise UserError(f"--out {config.out}: choose one of {', '.join(SUFFIXES)}")
    runs = {label: read_metrics(Path(run)) for label, run in zip(labels(config.run), config.run,
                                                                 strict=True)}  # fmt: skip
    figure = draw(runs, config.smooth, config.log_scale)
    try:
        figure.savefig(config.out, dpi=150)
    except OSError as error:
        raise UserError(f"--out {config.out} cannot be written: {error}") from None
    print(config.out)


def labels(runs: list[str]) -> list[str]:
    """Folder names, or the whole paths where two names are the same."""
    names = [Path(run).name for run in runs]
    return names if len(set(names)) == len(names) else list(runs)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, `tokens` filled in; a torn last line is left out."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise UserError(f"no metrics in {run}: {error.strerror or error}") from None
    records = [record for record in map(_record, lines) if "step" in record]
    tokens = {r["step"]: r["tokens"] for r in records if "tokens" in r}
    records = [r | {"tokens": tokens[r["step"]]} for r in records if r["step"] in tokens]
    if not records:
        raise UserError(f"{path} has no record of a training step")
    return records


def _record(line: str) -> dict[str, Any]:
    """One record; empty for a line that is none (torn when the run was killed)."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def draw(runs: dict[str, list[dict[str, Any]]], smooth: int = 1, log_scale: bool = False) -> Any:
    """A matplotlib figure with one panel per kind of figure that a run has."""
    from matplotlib.figure import Figure  # no window system is asked for

    panels = [p for p in PANELS if any(curve(r, key)[0] for r in runs.values() for key in p[2])]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, (title, unit, keys) in zip(axes, panels, strict=False):
        for number, (label, records) in enumerate(runs.items()):
            for key in keys:
                x, y = curve(records, key)
                heldout = key.startswith("heldout")
                if key == "loss_nats":
                    x, y = average(x, smooth), average(y, smooth)
                ax.plot(
                    x,
                    y,
                    color=f"C{number}",
                    linewidth=1,
                    alpha=1.0 if heldout or len(keys) == 1 else 0.5,
                    marker="o" if heldout else None,
                    markersize=3,
                    label=f"{label}, held-out" if heldout else label,
                )
        ax.set(title=title, xlabel="tokens", ylabel=unit)
        if log_scale:
            ax.set_xscale("log")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    for ax in axes[len(panels) :]:
        ax.remove()
    return figure


def curve(records: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Tokens and values of one figure, where it is a number."""
    points = [(r["tokens"], r[key]) for r in records if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def average(values: list[float], width: int) -> list[float]:
    """Means over neighbouring groups of `width` values; the last group may be shorter."""
    groups = [values[i : i + width] for i in range(0, len(values), width)]
    return [sum(group) / len(group) for group in groups]
