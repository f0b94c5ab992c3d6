"""The results as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ABSENT = "-"


def markdown(results: dict[str, Any]) -> str:
    """table.md: what was run, one row per model in the order of the configuration, what is open."""
    rows = results["table"]
    with_lambada = any("lambada_paper_accuracy" in row for row in rows)
    columns = COLUMNS + (LAMBADA_COLUMNS if with_lambada else ()) + COST_COLUMNS
    lines = [
        f"# {results['name']}",
        "",
        *_setting(results),
        "",
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|" + "|".join("---" if i == 0 else "--:" for i in range(len(columns))) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(cell(row) for _, cell in columns) + " |")
    return "\n".join([*lines, "", *_notes(results), ""])


def _setting(results: dict[str, Any]) -> list[str]:
    data, heldout = results["data"], results["data"]["heldout"]
    done = sum(run["status"] == "finished" for run in results["runs"])
    lambada = results["lambada"]
    return [
        f"{done} of {len(results['runs'])} runs finished; seeds "
        f"{', '.join(map(str, results['seeds']))}; {results['tokens']:,} training tokens each "
        f"({results['steps']:,} steps of {results['batch_size']} windows of "
        f"{data['window_tokens']}), {results['tokens'] / data['train']['tokens']:.2f} passes over "
        f"{data['train']['tokens']:,}.",
        f"Held out: {heldout['tokens']:,} tokens, {heldout['utf8_bytes']:,} bytes in "
        f"{heldout['documents']:,} documents, disjoint windows of {data['window_tokens']} from the "
        f"zero state; vocabulary {data['vocab_size']:,}.",
        *(
            [f"LAMBADA: {lambada['passages']:,} passages of {lambada['source']}."]
            if lambada
            else []
        ),
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    notes = [
        f"- gap: 100 (value / {results['reference']} - 1), seed by seed; ±: standard deviation "
        "over seeds (none for one seed).",
        "- embedding: with an untied head; rest: all other parameters.",
        "- train s, tokens/s: time in training steps alone, on the machine and under the load that "
        "each run met.",
    ]
    for row in results["table"]:
        sweep = row["sweep"]
        if sweep:
            tried = ", ".join(
                f"{t['learning_rate']:g}: {_number(t['unread_nats_per_token'], 4)}"
                for t in sweep["tried"]
            )
            edge = "; the best lies at the edge of what was tried" if sweep["at_edge"] else ""
            notes.append(
                f"- {row['model']}: learning rate by nats per token on {sweep['windows']} unread "
                f"windows of the training split after {sweep['steps']} steps ({tried}){edge}."
            )
        elif row["source"] not in (None, "own", "shared"):
            notes.append(f"- {row['model']}: learning rate of {row['source']}.")
        if row["options"]:
            options = ", ".join(
                f"{section}.{name} {value}"
                for section, values in row["options"].items()
                for name, value in values.items()
            )
            notes.append(f"- {row['model']}: {options}.")
    for run in results["runs"]:
        if run["fault"] is not None:
            notes.append(f"- {run['model']} with seed {run['seed']}: {run['fault']}.")
    commit = results["commit"] or "no git checkout"
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    return [*notes, "", f"{versions}; {commit}."]


def _mean(metric: str, digits: int) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        return _with_spread(row.get(metric), "mean", "sd", digits)

    return cell


def _gap(metric: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        text = _with_spread(row.get(metric), "gap_percent", "gap_sd", 1, sign="+")
        return text if text == ABSENT else f"{text} %"

    return cell


def _with_spread(
    summary: dict[str, Any] | None, value: str, spread: str, digits: int, sign: str = ""
) -> str:
    if summary is None or summary[value] is None:
        return ABSENT
    text = f"{summary[value]:{sign},.{digits}f}"
    if summary[spread] is not None:
        text += f" ± {summary[spread]:,.{digits}f}"
    return text


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None else f"{value:.{digits}f}"


def _count(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: ABSENT if row[name] is None else f"{row[name]:,}"


COLUMNS = (
    ("model", lambda row: row["model"]),
    ("layers", _count("layers")),
    ("parameters", _count("parameters")),
    ("embedding", _count("embedding_parameters")),
    ("rest", _count("other_parameters")),
    ("learning rate", lambda row: _rate(row)),
    ("seeds", lambda row: str(len(row["seeds"]))),
    ("perplexity", _mean("perplexity", 2)),
    ("gap", _gap("perplexity")),
    ("bits per byte", _mean("bits_per_byte", 4)),
)
LAMBADA_COLUMNS = (
    ("LAMBADA acc, paper", _mean("lambada_paper_accuracy", 4)),
    ("PPL, paper", _mean("lambada_paper_perplexity", 2)),
    ("gap", _gap("lambada_paper_perplexity")),
    ("acc, lm-eval", _mean("lambada_lm_eval_accuracy", 4)),
    ("PPL, lm-eval", _mean("lambada_lm_eval_perplexity", 2)),
)
COST_COLUMNS = (("train s", _mean("seconds", 0)), ("tokens/s", _mean("tokens_per_s", 0)))


def _rate(row: dict[str, Any]) -> str:
    return ABSENT if row["learning_rate"] is None else f"{row['learning_rate']:g}"
