"""From runs to the numbers of the table: means, spreads and gaps over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

METRICS = (
    "nats_per_token",
    "perplexity",
    "bits_per_byte",
    "lambada_paper_accuracy",
    "lambada_paper_perplexity",
    "lambada_lm_eval_accuracy",
    "lambada_lm_eval_perplexity",
    "seconds",
    "tokens_per_s",
)
"""Figures of a run that are averaged over seeds and set against the reference's."""


def summarise(
    models: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], reference: str
) -> list[dict[str, Any]]:
    """One row per model: what is known of it, `seeds` that are finished, and for each metric
    `mean`, `sd` (over seeds, n - 1; None for one seed), `n` and the gap to the reference. A figure
    that one seed has no finite number for has no mean.

    `gap_percent` is 100 (value / reference - 1), as the paper gives gaps, averaged over the seeds
    that both have finished; `gap_sd` is its spread over these.
    """
    return [
        model
        | {"seeds": [r["seed"] for r in finished_of(runs, model["model"])]}
        | {
            metric: summary
            for metric in METRICS
            if (summary := _summary(runs, model["model"], reference, metric)) is not None
        }
        for model in models
    ]


def finished_of(runs: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The finished runs of a model."""
    return [run for run in runs if run["model"] == name and run["status"] == "finished"]


def _summary(
    runs: Sequence[dict[str, Any]], name: str, reference: str, metric: str
) -> dict[str, Any] | None:
    own = _by_seed(runs, name, metric)
    if not own:
        return None
    values = [value for value in own.values() if value is not None]
    if len(values) < len(own):
        unknown = dict.fromkeys(("mean", "sd", "gap_percent", "gap_sd"))
        return unknown | {"n": len(own)}
    theirs = _by_seed(runs, reference, metric)
    pairs = [(own[seed], theirs.get(seed)) for seed in own]
    gaps = [100 * (mine / other - 1) for mine, other in pairs if mine is not None and other]
    return {
        "mean": statistics.fmean(values),
        "sd": _spread(values),
        "n": len(own),
        "gap_percent": statistics.fmean(gaps) if gaps else None,
        "gap_sd": _spread(gaps),
    }


def _by_seed(runs: Sequence[dict[str, Any]], name: str, metric: str) -> dict[int, float | None]:
    return {run["seed"]: run[metric] for run in finished_of(runs, name) if metric in run}


def _spread(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
