"""Two pictures of a comparison: loss over tokens trained on, loss over position in the window."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from groundlm.errors import UserError
from groundlm.evaluation.tally import context_bands
from groundlm.model.loading import one_line
from groundlm.training.plot import average, curve, read_metrics

POINTS = 200
"""Most points drawn of a training curve; neighbours are averaged. The JSON has all of them."""


def loss_curve(run: Path) -> dict[str, list[float]]:
    """Training and held-out loss of a run, in nats per token, over tokens trained on."""
    records = read_metrics(run)
    tokens, loss = curve(records, "loss_nats")
    heldout_tokens, heldout = curve(records, "heldout_nats_per_token")
    return {
        "tokens": tokens,
        "loss_nats": loss,
        "heldout_tokens": heldout_tokens,
        "heldout_nats_per_token": heldout,
    }


def draw_loss_curves(curves: Sequence[dict[str, Any]]) -> Figure:
    """One line per run (`model`, `seed`, and the lists of `loss_curve`), held-out loss as dots."""
    figure, ax = _axes("tokens trained on", "nats per token")
    for entry, color, label in _styled(curves):
        width = -(-len(entry["tokens"]) // POINTS) or 1
        ax.plot(
            average(entry["tokens"], width),
            average(entry["loss_nats"], width),
            color=color,
            linewidth=1,
            label=label,
        )
        ax.plot(entry["heldout_tokens"], entry["heldout_nats_per_token"], "o", color=color, ms=3)
    ax.legend(fontsize="small")
    return figure


def draw_loss_by_position(curves: Sequence[dict[str, Any]]) -> Figure:
    """One line per run (`model`, `seed`, `nats` by position), positions averaged in bands."""
    figure, ax = _axes("tokens of context in the window", "held-out nats per token")
    for entry, color, label in _styled(curves):
        centres, means = banded(entry["nats"])
        ax.plot(centres, means, color=color, linewidth=1, marker=".", markersize=4, label=label)
    ax.set_xscale("log")
    ax.legend(fontsize="small")
    return figure


def banded(nats: Sequence[float]) -> tuple[list[float], list[float]]:
    """Mean context and mean nats in bands of context, single numbers first, then wider."""
    starts = [int(b) - 1 for b in context_bands(len(nats)) if b <= len(nats)]
    bounds = [*starts, len(nats)]
    spans = list(pairwise(bounds))
    return (
        [(first + 1 + last) / 2 for first, last in spans],
        [float(np.mean(nats[first:last])) for first, last in spans],
    )


def save(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all; raises `UserError` if it cannot be written."""
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(partial, dpi=150)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    ax.set(xlabel=x, ylabel=y)
    ax.grid(alpha=0.3)
    return figure, ax


def _styled(curves: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str, str | None]]:
    """Each curve with its model's colour, and with its label where the model comes first."""
    names = list(dict.fromkeys(entry["model"] for entry in curves))
    seen: set[str] = set()
    styled = []
    for entry in curves:
        name = entry["model"]
        styled.append((entry, f"C{names.index(name) % 10}", None if name in seen else name))
        seen.add(name)
    return styled
