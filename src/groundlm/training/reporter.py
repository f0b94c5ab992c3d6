"""What a run tells while it trains: metrics.jsonl, a tracker, the progress line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groundlm.errors import RunFault
from groundlm.training.metrics import MetricsFile, ProgressLine, finite
from groundlm.training.runfolder import write_config
from groundlm.training.trackers import TRACKERS, NoTracker, Tracker, require_tracker


class Clock:
    """Seconds spent training, evaluation and saving left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last lap."""
        self._since = time.perf_counter()

    def lap_s(self) -> float:
        """Seconds since the last lap."""
        spent = time.perf_counter() - self._since
        self.restart()
        return spent


class Silence:
    """The reporter of every rank but the first."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to do."""

    def record(self, step: int, figures: dict[str, Any]) -> None:
        """Nothing to do."""

    def progress(self, step: int, note: str, report: bool) -> None:
        """Nothing to do."""

    def tell(self, text: str) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing to do."""


class Reporter(Silence):
    """Writes metrics and shows progress.

    A disk that does not take a record is reported by `check`, at a place where all ranks meet.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], tracker: str, step: int, last_step: int
    ) -> None:
        """Raises `UserError` for a tracker that is not installed, `RunFault` for a full disk."""
        self._fault: OSError | None = None
        require_tracker(tracker)
        write_config(folder, config)
        try:
            self._metrics = MetricsFile(folder / "metrics.jsonl", step)
        except OSError as error:
            raise RunFault(f"{folder / 'metrics.jsonl'} cannot be written: {error}") from None
        self._tracker: Tracker = TRACKERS[tracker](folder, config)
        self._display = ProgressLine(step, last_step)

    def __exit__(self, *exc: object) -> None:
        self._track(self._tracker.close)
        self._display.close()
        self._metrics.close()

    def record(self, step: int, figures: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and the tracker's record."""
        record = {"step": step, **figures}
        try:
            self._metrics.write(record)
        except OSError as error:
            self._fault = error
        self._track(lambda: self._tracker.write(finite(record)))

    def _track(self, send: Callable[[], None]) -> None:
        """Let a tracker's failure (a network, a service) cost its records and not the run."""
        try:
            send()
        except Exception as error:  # each service has its own kinds
            self._tracker = NoTracker()
            self.tell(f"no more records go to the tracker: {' '.join(str(error).split())}")

    def progress(self, step: int, note: str, report: bool) -> None:
        """Move the bar; where there is no terminal, print a line if `report`."""
        self._display.step(step, note, report)

    def tell(self, text: str) -> None:
        """One line for the person watching."""
        self._display.say(text)

    def check(self) -> None:
        """Raises `RunFault` if a record could not be written."""
        if self._fault is not None:
            raise RunFault(f"metrics.jsonl cannot be written: {self._fault}")
