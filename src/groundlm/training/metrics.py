"""What a run reports: metrics.jsonl for programs, one live line for the person watching."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class MetricsFile:
    """Appends one JSON object a line; on continuation, lines after the resumed step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the torn last line of a run that was killed
                if record["step"] <= resumed_step:
                    kept.append(line)
            path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
