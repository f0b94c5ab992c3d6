"""Draws the pictures of docs/results/small-scale.md from the numbers beside this file.

    python docs/results/small-scale/figures.py

reads every `*/results.json` (one folder per comparison, as `groundlm compare` wrote it) and their
runs' `metrics.jsonl`; writes `loss_by_tokens.png`, `loss_by_minutes.png`, `loss_by_tokens.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
REFERENCE = "transformer"
Losses = dict[str, dict[int, list[dict[str, Any]]]]


def finished_runs() -> list[dict[str, Any]]:
    """The finished runs of all comparisons, with the folder that each lies in."""
    runs = []
    for path in sorted(HERE.glob("*/results.json")):
        for run in json.loads(path.read_text("utf-8"))["runs"]:
            if run["status"] == "finished":
                runs.append(run | {"folder": path.parent / "runs" / Path(run["run"]).name})
    return runs


def by_model_and_tokens(runs: list[dict[str, Any]]) -> Losses:
    """Runs by model and tokens trained on; a seed that two comparisons made counts once."""
    found: Losses = defaultdict(lambda: defaultdict(list))
    for run in runs:
        same = found[run["model"]][run["tokens"]]
        if run["seed"] not in [other["seed"] for other in same]:
            same.append(run)
    return found


def table(losses: Losses) -> list[dict[str, Any]]:
    """Mean held-out loss and perplexity by model and tokens, with the gap to the reference."""
    rows = []
    for model, of_model in losses.items():
        for tokens, runs in sorted(of_model.items()):
            theirs = {r["seed"]: r["perplexity"] for r in losses[REFERENCE].get(tokens, [])}
            gaps = [100 * (r["perplexity"] / theirs[r["seed"]] - 1) for r in runs
                    if r["seed"] in theirs]  # fmt: skip
            rows.append(
                {
                    "model": model,
                    "tokens": tokens,
                    "seeds": sorted(r["seed"] for r in runs),
                    "nats_per_token": fmean(r["nats_per_token"] for r in runs),
                    "perplexity": fmean(r["perplexity"] for r in runs),
                    "gap_percent": fmean(gaps) if gaps else None,
                }
            )
    return rows


def draw_tokens(losses: Losses) -> Figure:
    """Held-out loss, and the gap to the reference, against the tokens trained on."""
    figure = Figure((8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rows = table(losses)
    for number, model in enumerate(m for m in losses if len(losses[m]) > 1):
        own = [row for row in rows if row["model"] == model]
        style = {"color": f"C{number}", "marker": "o", "ms": 4, "label": model}
        above.plot([r["tokens"] for r in own], [r["nats_per_token"] for r in own], **style)
        for tokens, runs in losses[model].items():
            each = [r["nats_per_token"] for r in runs]
            above.plot([tokens] * len(each), each, ".", color=f"C{number}", ms=3)
        gaps = [r for r in own if r["gap_percent"] is not None]
        below.plot([r["tokens"] for r in gaps], [r["gap_percent"] for r in gaps], **style)
    above.set_ylabel("held-out nats per token")
    below.set_ylabel(f"perplexity against {REFERENCE}, percent")
    below.set_xlabel("tokens trained on")
    below.axhline(0, color="0.6", linewidth=0.8)
    above.set_xscale("log")
    above.legend(fontsize="small")
    return figure


def draw_minutes(runs: list[dict[str, Any]]) -> Figure:
    """Held-out loss during each first-seed run of the main comparison, over minutes of training."""
    figure = Figure((8, 5), layout="constrained")
    ax = figure.subplots()
    for run in runs:
        if run["folder"].parents[1].name != "compare" or run["seed"] != 1:
            continue
        minutes, nats = heldout_over_minutes(run["folder"] / "metrics.jsonl")
        ax.plot(minutes, nats, marker=".", linewidth=1, label=run["model"])
    ax.set_xlabel("minutes of training")
    ax.set_ylabel("held-out nats per token, first windows")
    ax.set_xscale("log")
    ax.legend(fontsize="small")
    return figure


def heldout_over_minutes(path: Path) -> tuple[list[float], list[float]]:
    """Minutes in training steps, and held-out loss, at each evaluation of a run."""
    minutes: list[float] = []
    nats: list[float] = []
    elapsed_s = 0.0
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        elapsed_s = record.get("elapsed_s", elapsed_s)
        if record.get("heldout_nats_per_token") is not None:
            minutes.append(elapsed_s / 60)
            nats.append(record["heldout_nats_per_token"])
    return minutes, nats


def main() -> None:
    """Write the pictures and the numbers of the first."""
    runs = finished_runs()
    losses = by_model_and_tokens(runs)
    if any(len(of_model) > 1 for of_model in losses.values()):
        draw_tokens(losses).savefig(HERE / "loss_by_tokens.png", dpi=120)
    draw_minutes(runs).savefig(HERE / "loss_by_minutes.png", dpi=120)
    text = json.dumps({"reference": REFERENCE, "rows": table(losses)}, indent=2)
    (HERE / "loss_by_tokens.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
