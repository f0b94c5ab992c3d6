"""report.html: one self-contained page drawn from stats.json and, if it is there, ablate.json."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.axes import Axes

from groundlm.analysis import plots
from groundlm.analysis.plots import show
from groundlm.errors import UserError
from groundlm.model.loading import one_line

TEMPLATE = "report.html.jinja"
SECTIONS = {
    "state": ("state_norm", "dimension_sd", "correlations", "components", "effective_ranks"),
    "mean": ("mean_state", "mean_stability", "mean_decoded", "mean_embedding", "how_soon",
             "decoder_bias"),
    "horizons": ("state_horizon", "memory_horizon", "write_strength"),
    "step": ("gates", "budget"),
}  # fmt: skip
DPI = 130
STATS_NAME, ABLATION_NAME, REPORT_NAME = "stats.json", "ablate.json", "report.html"
MARKS = {STATS_NAME: "curves", ABLATION_NAME: "interventions"}
"""A key by which each of our files is known."""
PICTURES = ("sd", "correlations", "variance", "decoded", "how_soon", "cosine", "retention",
            "ablation", "since_reset", "since_memory")  # fmt: skip


def check_out(out: Path) -> None:
    """Refuse a folder in which a file of our names is not ours, before any work.

    Raises `UserError` naming the file.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file")
    ours = [out / name for name in MARKS if (out / name).exists()]
    for path in ours:
        _read(path)
    pictures = [out / f"{name}.png" for name in PICTURES]
    for path in (out / REPORT_NAME, *pictures):
        if path.exists() and (path.is_dir() or not ours):
            raise UserError(f"{path} is not of an analysis: choose another --out")


def write_report(out: Path) -> Path:
    """Draw the plots (PNG) and report.html into the folder that stats.json is in; returns its path.

    An ablate.json of other weights, text or precision is left out, and the page says so; pictures
    that are not drawn any more are removed. Raises `UserError` if a file cannot be read or written.
    """
    stats = _read(out / STATS_NAME)
    ablation = _read(out / ABLATION_NAME) if (out / ABLATION_NAME).is_file() else None
    if ablation is not None and (other := _differs(stats, ablation)):
        stats["left_out"][ABLATION_NAME] = f"it is of another {other}: run ablate again"
        ablation = None
    pictures = {name: _png(ax) for name, ax in draw(stats, ablation)}
    for name in PICTURES:
        if name in pictures:
            _write(out / f"{name}.png", pictures[name])
        else:
            (out / f"{name}.png").unlink(missing_ok=True)
    _write(out / REPORT_NAME, render(stats, ablation, pictures).encode())
    return out / REPORT_NAME


def _differs(stats: dict[str, Any], ablation: dict[str, Any]) -> str | None:
    """In what two results do not belong together."""
    if stats["weights_sha256"] != ablation["weights_sha256"]:
        return "model"
    if stats["source"]["sha256"] != ablation["source"]["sha256"]:
        return "text"
    return None if stats["dtype"] == ablation["dtype"] else "precision"


def draw(
    stats: dict[str, Any], ablation: dict[str, Any] | None = None
) -> Iterator[tuple[str, Axes]]:
    """Every plot that the numbers allow, by name."""
    curves, figures = stats["curves"], stats["figures"]
    yield "sd", plots.plot_sd(curves["sd"])
    yield "correlations", plots.plot_correlations(curves["correlations"])
    yield "variance", plots.plot_variance(curves["variance"])
    yield "decoded", plots.plot_decoded(curves["decoded"])
    if "how_soon" in curves:
        yield "how_soon", plots.plot_how_soon(curves["how_soon"])
    if curves["cosine"]["lags"]:
        yield "cosine", plots.plot_cosine(curves["cosine"])
    if "retention" in curves:
        horizons = figures["memory_horizon"]["values"]["horizon_tokens"]
        yield "retention", plots.plot_retention(curves["retention"], horizons)
    if ablation is not None:
        yield "ablation", plots.plot_ablation(ablation["interventions"])
        aged = [row for row in ablation["interventions"] if "by_tokens_since" in row]
        resets = [row for row in aged if row["name"].startswith("reset")]
        for name, rows in (
            ("since_reset", resets),
            ("since_memory", [row for row in aged if row not in resets]),
        ):
            if rows:
                yield name, plots.plot_tokens_since(rows)


def render(
    stats: dict[str, Any], ablation: dict[str, Any] | None, pictures: dict[str, bytes]
) -> str:
    """The page: pictures and every number are inside it, and it asks for nothing from outside."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "show": show, "number": number, "values": in_words, "interval": interval_text
    }  # fmt: skip
    text = (resources.files("groundlm.analysis") / TEMPLATE).read_text("utf-8")
    surprisals = [t["surprisal_nats"] for t in (stats["example"] or {"tokens": []})["tokens"]]
    return environment.from_string(text).render(
        stats=stats,
        ablation=ablation,
        pictures={k: base64.b64encode(v).decode() for k, v in pictures.items()},
        sections=SECTIONS,
        most_surprisal=max(surprisals, default=1.0) or 1.0,
        raw={
            name: json.dumps(value, indent=1, ensure_ascii=False)
            for name, value in (("stats.json", stats), ("ablate.json", ablation))
            if value is not None
        },
    )


def number(value: Any, signed: bool = False) -> str:
    """A number for a reader: three digits, thousands separated; None is a dash."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, int):
        return f"{value:+,}" if signed else f"{value:,}"
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:+.2e}" if signed else f"{value:.2e}"
    digits = 3 if abs(value) < 10 else 1
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def interval_text(interval: list[float] | None, digits: int) -> str:
    """`+0.1 to +0.2`; nothing where there is no interval."""
    return "" if interval is None else " to ".join(f"{x:+.{digits}f}" for x in interval)


def in_words(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each value of a figure; ids are left to the names of their tokens."""
    rows = []
    for name, value in values.items():
        if name == "top_ids":
            continue
        if isinstance(value, list):
            shown = [show(x) if isinstance(x, str) else number(x) for x in value]
            text = ("  " if name == "top_tokens" else ", ").join(shown)
        else:
            text = number(value)
        rows.append((name.replace("_", " "), text))
    return rows


def _png(ax: Axes) -> bytes:
    buffer = io.BytesIO()
    figure: Any = ax.figure
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict) or not {MARKS[path.name], "weights_sha256"} <= found.keys():
        raise UserError(f"{path} is not of this analysis: choose another --out")
    return found


def _write(path: Path, content: bytes) -> None:
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None
