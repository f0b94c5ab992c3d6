"""SIGINT and SIGTERM: a request to stop after the current step."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Signals:
    """Remembers the first SIGINT or SIGTERM; a second one interrupts at once."""

    def __init__(self) -> None:
        self.caught = 0
        """The signal's number, 0 if there was none."""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
