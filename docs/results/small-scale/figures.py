"""Draws the pictures and tables of docs/results/small-scale.md from the numbers beside this file.

    python docs/results/small-scale/figures.py

reads every `*/results.json` (one folder per comparison, as `groundlm compare` wrote it) and their
runs' `metrics.jsonl`; writes `loss_by_tokens.png`, `loss_by_minutes.png`, `loss_by_tokens.json`
and, as the document shows them, `tables.md`. Speeds come from the comparison in `speed`, which ran
all models one after another on quiet cores, and from nowhere else.
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
NAMES = {
    "transformer": "Transformer++",
    "transformer-muon": "Transformer++, Muon",
    "gated-deltanet": "Gated DeltaNet",
    "gated-deltanet-1l": "Gated DeltaNet, 1 layer",
    "mamba2": "Mamba-2",
    "gpn": "GPN, no memory",
    "gpn-m-1l": "GPN+M, 1 layer",
    "gpn-m-1l-bias": "GPN+M, decoder bias",
    "gpn-m-1l-carried": "GPN+M, carried state",
    "gpn-m-1l-muon": "GPN+M, Muon",
    "gpn-m-2l": "GPN+M, 2 layers",
}
"""Models of the comparisons as tables and legends call them."""
PAPER_GAPS = {"gated-deltanet": -4.4, "gpn-m-1l": 12.5, "gpn-m-2l": 5.6, "gpn": 46.5}
"""Perplexity against Transformer++ in percent, from the paper's table of results."""
Losses = dict[str, dict[int, list[dict[str, Any]]]]


def finished_runs() -> list[dict[str, Any]]:
    """The finished runs of all comparisons but `speed`, with the folder that each lies in."""
    runs = []
    for path in sorted(HERE.glob("*/results.json")):
        if path.parent.name == "speed":
            continue
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
        style = {"color": f"C{number}", "marker": "o", "ms": 4, "label": NAMES[model]}
        above.plot([r["tokens"] for r in own], [r["nats_per_token"] for r in own], **style)
        for tokens, runs in losses[model].items():
            each = [r["nats_per_token"] for r in runs]
            above.plot([tokens] * len(each), each, ".", color=f"C{number}", ms=3)
        gaps = [r for r in own if r["gap_percent"] is not None]
        below.plot([r["tokens"] for r in gaps], [r["gap_percent"] for r in gaps], **style)
    above.set_ylabel("held-out nats per token")
    below.set_ylabel(f"perplexity against {NAMES[REFERENCE]}, percent")
    below.set_xlabel("tokens trained on")
    below.axhline(0, color="0.6", linewidth=0.8)
    above.set_xscale("log")
    above.legend(fontsize="small")
    return figure


def quiet_speeds() -> dict[str, float]:
    """Training tokens/s of each model in the comparison `speed` (empty where it was not run)."""
    path = HERE / "speed" / "results.json"
    if not path.exists():
        return {}
    runs = json.loads(path.read_text("utf-8"))["runs"]
    return {r["model"]: r["tokens_per_s"] for r in runs if r["status"] == "finished"}


def draw_minutes(runs: list[dict[str, Any]], tokens_per_s: dict[str, float]) -> Figure:
    """Held-out loss during each first-seed run of the main comparison, over minutes of training."""
    figure = Figure((8, 5), layout="constrained")
    ax = figure.subplots()
    for run in first_seed(runs):
        if run["model"] in tokens_per_s:
            tokens, nats = heldout_over_tokens(run)
            minutes = [n / tokens_per_s[run["model"]] / 60 for n in tokens]
            ax.plot(minutes, nats, marker=".", linewidth=1, label=NAMES[run["model"]])
    ax.set_xlabel("minutes of training steps, at the speed of quiet cores")
    ax.set_ylabel("held-out nats per token, first windows")
    ax.set_xscale("log")
    ax.legend(fontsize="small")
    return figure


def first_seed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first-seed runs of the main comparison."""
    return [r for r in runs if r["folder"].parents[1].name == "compare" and r["seed"] == 1]


def heldout_over_tokens(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Tokens trained on, and held-out loss, at each evaluation of a run."""
    text = (run["folder"] / "metrics.jsonl").read_text("utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    found = [r for r in records if r.get("heldout_nats_per_token") is not None]
    per_step = run["tokens"] / max(r["step"] for r in records)
    return [r["step"] * per_step for r in found], [r["heldout_nats_per_token"] for r in found]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: dict[str, Any], form: str) -> str:
    """Mean and, over several seeds, standard deviation of a figure of the main table."""
    if values["mean"] is None:
        return ""
    text = format(values["mean"], form)
    return text if values["sd"] is None else f"{text} ± {format(values['sd'], form)}"


def main_table(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    """Every model of the main comparison, with the paper's gap beside the one found here.

    The interval is that of the first seed, over documents.
    """
    interval = {run["model"]: run["perplexity_interval"] for run in first_seed(runs)}
    header = ["model", "layers", "learning rate", "seeds", "perplexity", "95 % interval", "gap, %"]
    header += ["paper's gap, %", "bits per byte", "LAMBADA PPL, paper", "PPL, lm-eval"]
    header += ["accuracy, paper", "accuracy, lm-eval"]
    lines = []
    for row in rows:
        gap, paper = row["perplexity"]["gap_percent"], PAPER_GAPS.get(row["model"])
        is_reference = row["model"] == REFERENCE
        lines.append(
            [
                NAMES[row["model"]],
                str(row["layers"]),
                f"{row['learning_rate']:g}",
                str(row["perplexity"]["n"]),
                spread(row["perplexity"], ".2f"),
                "{:.2f} to {:.2f}".format(*interval[row["model"]]),
                "" if is_reference else f"{gap:+.1f}",
                "" if paper is None else f"{paper:+.1f}",
                spread(row["bits_per_byte"], ".4f"),
                spread(row["lambada_paper_perplexity"], ".1f"),
                spread(row["lambada_lm_eval_perplexity"], ",.0f"),
                spread(row["lambada_paper_accuracy"], ".4f"),
                spread(row["lambada_lm_eval_accuracy"], ".4f"),
            ]
        )
    return markdown(header, lines)


def rates_table(rows: list[dict[str, Any]]) -> str:
    """What each sweep found: nats per token on unread training windows, the best one in bold."""
    swept = [row for row in rows if row["sweep"]]
    found = {
        row["model"]: {
            t["learning_rate"]: t["unread_nats_per_token"] for t in row["sweep"]["tried"]
        }
        for row in swept
    }
    rates = sorted({rate for tried in found.values() for rate in tried})
    lines = []
    for model, tried in found.items():
        best = min(tried, key=lambda rate: tried[rate])
        cells = [f"{tried[rate]:.3f}" if rate in tried else "" for rate in rates]
        cells[rates.index(best)] = f"**{tried[best]:.3f}**"
        lines.append([NAMES[model], *cells])
    return markdown(["model", *(f"{rate:g}" for rate in rates)], lines)


def tokens_table(losses: Losses) -> str:
    """Perplexity, and the gap to the reference, by model and tokens trained on."""
    rows = [row for row in table(losses) if len(losses[row["model"]]) > 1]
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["tokens"]: row for row in rows if row["model"] == model}
        cells = []
        for tokens in counts:
            if tokens not in own:
                cells.append("")
                continue
            gap = own[tokens]["gap_percent"]
            text = f"{own[tokens]['perplexity']:.2f}"
            shown = model != REFERENCE and gap is not None
            cells.append(f"{text} ({gap:+.1f} %)" if shown else text)
        lines.append([NAMES[model], *cells])
    return markdown(["model", *(f"{tokens / 1e6:.1f} M" for tokens in counts)], lines)


def speed_table(runs: list[dict[str, Any]], tokens_per_s: dict[str, float]) -> str:
    """Speed on quiet cores, the minutes that a run takes at it, and the reference's loss in time.

    The last column: minutes until the held-out loss is down to what the reference ends with.
    """
    first = {run["model"]: run for run in first_seed(runs)}
    goal = heldout_over_tokens(first[REFERENCE])[1][-1]
    lines = []
    for model, run in first.items():
        if model not in tokens_per_s:
            continue
        tokens, nats = heldout_over_tokens(run)
        there = next((n for n, loss in zip(tokens, nats, strict=True) if loss <= goal), None)
        per_minute = 60 * tokens_per_s[model]
        reached = "not reached" if there is None else f"{there / per_minute:.1f}"
        lines.append(
            [
                NAMES[model],
                f"{tokens_per_s[model]:,.0f}",
                f"{run['tokens'] / per_minute:.1f}",
                reached,
            ]
        )
    return markdown(["model", "tokens/s", "minutes of the run", "minutes to its loss"], lines)


def tables(runs: list[dict[str, Any]], losses: Losses, tokens_per_s: dict[str, float]) -> str:
    """All tables of the document."""
    rows = json.loads((HERE / "compare" / "results.json").read_text("utf-8"))["table"]
    rows = [row for row in rows if row["seeds"]]
    rows.sort(key=lambda row: list(NAMES).index(row["model"]))
    parts = [main_table(rows, runs), rates_table(rows), tokens_table(losses)]
    if tokens_per_s:
        parts.append(speed_table(runs, tokens_per_s))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the pictures, the numbers of the first, and the tables."""
    runs = finished_runs()
    tokens_per_s = quiet_speeds()
    losses = by_model_and_tokens(runs)
    draw_tokens(losses).savefig(HERE / "loss_by_tokens.png", dpi=120)
    if tokens_per_s:
        draw_minutes(runs, tokens_per_s).savefig(HERE / "loss_by_minutes.png", dpi=120)
    text = json.dumps({"reference": REFERENCE, "rows": table(losses)}, indent=2)
    (HERE / "loss_by_tokens.json").write_text(text + "\n", "utf-8")
    (HERE / "tables.md").write_text(tables(runs, losses, tokens_per_s), "utf-8")


if __name__ == "__main__":
    main()
