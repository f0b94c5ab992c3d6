"""The plots of an analysis, each from its curve in stats.json onto matplotlib axes.

Every function takes its curve and, if wanted, axes to draw on; it returns the axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from groundlm.analysis.horizons import pools

FAST, SLOW, INK = "#d1662b", "#2b6cb0", "#2b6cb0"


def axes(width: float = 6.0, height: float = 3.4) -> Axes:
    """Fresh axes on a figure of their own, without any window system."""
    return Figure(figsize=(width, height), layout="constrained").subplots()


def plot_sd(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Sorted sd of the dimensions."""
    ax = _prepared(ax, "dimension, by rank", "sd")
    ax.plot(curve["rank"], curve["sd"], color=INK)
    if min(curve["sd"]) > 0:
        ax.set_yscale("log")
    return _plain_ticks(ax)


def plot_correlations(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Histogram of absolute correlations."""
    ax = _prepared(ax, "absolute correlation of two dimensions", "share of pairs")
    bins = curve["bins"]
    ax.bar((np.arange(bins) + 0.5) / bins, curve["share_of_pairs"], 0.9 / bins, color=INK)
    return ax


def plot_variance(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Cumulated share of the variance over principal components."""
    ax = _prepared(ax, "principal components", "share of variance")
    ax.plot(curve["components"], curve["share"], color=INK)
    for share in (0.5, 0.9, 0.99):
        ax.axhline(share, color="grey", linewidth=0.7, linestyle=":")
        ax.annotate(f"{share:.0%}", (1, share), xycoords=("axes fraction", "data"),
                    xytext=(-3, -2), textcoords="offset points", ha="right", va="top",
                    fontsize=8, color="grey")  # fmt: skip
    ax.set_ylim(0, 1.02)
    return ax


def plot_decoded(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Most likely tokens of the decoded mean state."""
    ax = _prepared(ax, "probability", "")
    names = [show(t) for t in curve.get("tokens", curve["ids"])][::-1]
    ax.barh(range(len(names)), curve["probability"][::-1], color=INK)
    ax.set_yticks(range(len(names)), names, family="monospace", parse_math=False)
    return ax


def plot_how_soon(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Cosine of the running mean with the mean state."""
    ax = _prepared(ax, "tokens read", "cosine with the mean state")
    ax.plot(curve["tokens"], curve["cosine"], color=INK)
    ax.set_xscale("log")
    ax.set_ylim(min(0.0, *curve["cosine"]), 1.02)
    return _plain_ticks(ax, "x")


def plot_cosine(curve: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Likeness of states over lags, raw and centred."""
    ax = _prepared(ax, "lag, tokens", "cosine of two states")
    ax.plot(curve["lags"], curve["raw"], "o-", color=SLOW, markersize=3, label="raw")
    ax.plot(curve["lags"], curve["centred"], "o-", color=FAST, markersize=3, label="centred")
    ax.axhline(0, color="grey", linewidth=0.7)
    ax.set_xscale("log", base=2)
    ax.legend(frameon=False)
    return _plain_ticks(ax, "x")


def plot_retention(
    curve: dict[str, Any], horizons: list[float | None], ax: Axes | None = None
) -> Axes:
    """Retention of each head over lags, its horizon marked where it crosses 1/e."""
    ax = _prepared(ax, "lag, tokens", "share left in the memory")
    fast, _ = pools(horizons)
    named: set[str] = set()
    for head, row in enumerate(curve["retention"]):
        pool = "fast" if head in fast else "slow"
        color = FAST if pool == "fast" else SLOW
        label = None if pool in named else f"{pool} heads"
        named.add(pool)
        ax.plot([0, *curve["lags"]], [1.0, *row], color=color, linewidth=1, label=label)
        if (horizon := horizons[head]) is not None:
            ax.plot(horizon, np.exp(-1), "o", color=color, markersize=4)
    ax.axhline(np.exp(-1), color="grey", linewidth=0.7, linestyle=":")
    ax.annotate("1/e", (1, np.exp(-1)), xycoords=("axes fraction", "data"), xytext=(-3, 2),
                textcoords="offset points", ha="right", fontsize=8, color="grey")  # fmt: skip
    ax.set_xscale("symlog", base=2, linthresh=1)
    ax.set_xlim(left=0)
    ax.legend(frameon=False)
    return _plain_ticks(ax, "x")


def plot_ablation(rows: list[dict[str, Any]], ax: Axes | None = None) -> Axes:
    """Change in nats per token of each intervention, with its interval."""
    ax = axes(8, 0.8 + 0.24 * len(rows)) if ax is None else ax
    ax = _prepared(ax, "change in nats per token", "")
    places = np.arange(len(rows))[::-1]
    changes = [row["change_nats"] for row in rows]
    ax.barh(places, changes, color=INK, height=0.7)
    for place, row in zip(places, rows, strict=True):
        if row["interval"] is not None:
            ax.plot(row["interval"], [place, place], color="black", linewidth=1)
    ax.axvline(0, color="grey", linewidth=0.7)
    ax.set_yticks(places, [row["name"].replace("_", " ") for row in rows], fontsize=8)
    ax.margins(y=0.01)
    return ax


def plot_tokens_since(rows: list[dict[str, Any]], ax: Axes | None = None) -> Axes:
    """What interventions that begin at some token cost, against the tokens read since then."""
    ax = _prepared(ax, "tokens read since", "change in nats per token")
    for row in rows:
        bands = row["by_tokens_since"]
        places = [(band["from"] + band["to"]) / 2 for band in bands]
        label = row["name"].replace("_", " ")
        (line,) = ax.plot(
            places, [band["change_nats"] for band in bands], "o-", markersize=3, label=label
        )
        if all(band["interval"] for band in bands):
            low, high = zip(*(band["interval"] for band in bands), strict=True)
            ax.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    ax.axhline(0, color="grey", linewidth=0.7)
    ax.set_xscale("log", base=2)
    ax.legend(frameon=False, fontsize="small")
    return _plain_ticks(ax, "x")


def show(token: Any) -> str:
    """A token as one visible line: spaces as open boxes, line breaks as arrows."""
    marks = {" ": "\N{OPEN BOX}", "\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\\t"}
    text = "".join(marks.get(c, c) for c in str(token))
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _prepared(ax: Axes | None, x: str, y: str) -> Axes:
    ax = axes() if ax is None else ax
    ax.set(xlabel=x, ylabel=y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _plain_ticks(ax: Axes, which: str = "y") -> Axes:
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if which == "y" and ax.get_yscale() == "log":
        low, high = ax.get_ylim()
        few = high / low < 30
        axis.set_minor_formatter(StrMethodFormatter("{x:g}") if few else NullFormatter())
    return ax
