"""One training of the matrix: gone on with, left alone when done, stopped by a signal."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from groundlm.comparison.matrix import Run
from groundlm.data.windows import TokenSplit
from groundlm.errors import FailedElsewhere, RunFault, UserError
from groundlm.training import checkpoint as ckpt
from groundlm.training.loop import run_train
from groundlm.training.settings import model_sizes, refuse_changes, run_settings
from groundlm.training.signals import Signals

POLL_S = 0.2


class NotFinished(Exception):
    """A run that would have to be trained first."""


class Interrupted(Exception):
    """A signal stopped the training; what was reached is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """The signal."""


def finished(run: Run, split: TokenSplit) -> dict[str, Any] | None:
    """Figures of a run on this split that stands at its last step, else None.

    With them its `checkpoint`, and the `environment` that it was trained in.

    Raises `UserError` if the folder's run was made with other settings.
    """
    newest = ckpt.newest_whole(run.folder, print) if run.folder.is_dir() else None
    if newest is None:
        return None
    progress = ckpt.read_progress(newest)
    sizes = model_sizes(run.train, split)
    settings = run_settings(run.train, sizes, split, 1, torch.device("cpu"))
    # Ranks, device and backend change rounding alone: what is done may have been done elsewhere.
    refuse_changes(run.folder, progress["settings"], settings, regroup=True)
    if progress["step"] < run.train.training.steps:
        return None
    extra = {"checkpoint": str(newest), "environment": progress["environment"]}
    return progress["figures"] | extra


def train(run: Run, split: TokenSplit, launcher: list[str]) -> dict[str, Any]:
    """Train to the last step, if the run is not there yet; returns its figures.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the run can be gone on with.
        RunFault: the run cannot go on: loss not finite, disk full, process killed.
        UserError: settings or data that do not fit.
    """
    if figures := finished(run, split):
        return figures
    if launcher:
        _launch(run, launcher)
    else:
        stopped = run_train(run.train)["interrupted_by"]
        if stopped:
            raise Interrupted(stopped)
    figures = finished(run, split)
    if figures is None:
        raise RunFault(f"{run.folder} did not reach step {run.train.training.steps}")
    return figures


def _launch(run: Run, launcher: list[str]) -> None:
    """Train in other processes; signals that come here are handed on to them."""
    path = _write_config(run)
    command = [*launcher, "train", "--config", str(path)]
    with Signals() as signals:
        try:
            # In a session of its own, so that a terminal's Ctrl-C reaches it once and through us.
            process = subprocess.Popen(command, start_new_session=True)
        except OSError as error:
            raise UserError(f"launcher {launcher[0]} cannot be started: {error.strerror}") from None
        sent = False
        while (code := process.poll()) is None:
            if signals.caught and not sent:
                process.send_signal(signals.caught)
                sent = True
            time.sleep(POLL_S)
    if signals.caught:
        raise Interrupted(signals.caught)
    if code == UserError.exit_code:
        raise FailedElsewhere(code)
    if code:
        raise RunFault(f"training of {run.name} ended with code {code}")


def _write_config(run: Run) -> Path:
    path = run.folder.with_name(f"{run.name}.yaml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dataclasses.asdict(run.train), sort_keys=False), "utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path
