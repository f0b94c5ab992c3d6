"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, Trackio, each by name."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from groundlm.errors import UserError

PROJECT = "groundlm"


class Tracker(Protocol):
    """Takes one record of metrics.jsonl at a time."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    """metrics.jsonl is enough."""

    def write(self, record: dict[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class TensorBoard:
    """Scalars under `<run>/tensorboard`."""

    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        _require("tensorboard", "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard")
        self._writer = writer.SummaryWriter(str(run / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Online:
    """Weights & Biases or Trackio, which share one interface; a continued run stays one run."""

    def __init__(self, package: str, run: Path, config: dict[str, Any]) -> None:
        self._module = _require(package, package)
        options: dict[str, Any] = {"id": _run_id(run)} if package == "wandb" else {}
        self._module.init(project=PROJECT, name=run.name, config=config, resume="allow", **options)

    def write(self, record: dict[str, Any]) -> None:
        self._module.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        self._module.finish()


TRACKERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "none": lambda run, config: NoTracker(),
    "tensorboard": TensorBoard,
    "wandb": lambda run, config: Online("wandb", run, config),
    "trackio": lambda run, config: Online("trackio", run, config),
}
"""Trackers by the name that `training.log` takes."""


def require_tracker(name: str) -> None:
    """Raises `UserError` if the package of a tracker is not installed."""
    if name != "none":
        _require(name, name)


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"training.log {package} needs a package: pip install {package}") from None


def _run_id(run: Path) -> str:
    """The identifier under which a run is continued, kept in its folder."""
    path = run / "tracker_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex, "utf-8")
    return path.read_text("utf-8").strip()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
