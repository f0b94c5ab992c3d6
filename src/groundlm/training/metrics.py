"""What a run reports: metrics.jsonl for programs, one live line for the person watching."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class MetricsFile:
    """Appends one JSON object a line; on continuation, lines after the resumed step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        if path.exists():
            lines = path.read_text("utf-8", "replace").splitlines()
            kept = [line for line in lines if _step(line) <= resumed_step]
            if len(kept) < len(lines):
                replace_text(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; figures that are not finite become null."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close; what a full disk did not take has been reported by `write`."""
        with suppress(OSError):
            self._file.close()


def _step(line: str) -> float:
    """The step of a record; infinite for a line that is none (torn when the run was killed)."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with None for every number that is not finite, which JSON cannot hold."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }


def replace_text(path: Path, text: str) -> None:
    """Give a file new content, all of it or none."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class ProgressLine:
    """A progress bar on a terminal; one plain line per report where there is none (both stderr)."""

    def __init__(self, first_step: int, steps: int) -> None:
        self._console = Console(stderr=True)
        self._first, self._steps, self._started = first_step, steps, time.perf_counter()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=first_step, note="")
            self._bar.start()

    def step(self, step: int, note: str, report: bool) -> None:
        """Show that `step` steps are done; where there is no terminal, only if `report`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note=note)
        elif report:
            spent = time.perf_counter() - self._started
            left_s = spent / (step - self._first) * (self._steps - step)
            minutes, seconds = divmod(round(left_s), 60)
            self.say(f"step {step}/{self._steps}  {note}  left {minutes}:{seconds:02d}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
