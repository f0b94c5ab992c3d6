"""One training of the matrix: gone on with, left alone when done, stopped by a signal."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from groundlm.comparison.matrix import Run
from groundlm.comparison.scoring import read_scores
from groundlm.data.integrity import file_sha256
from groundlm.data.windows import TokenSplit
from groundlm.errors import RunFault, UserError
from groundlm.training import checkpoint as ckpt
from groundlm.training.loop import run_train
from groundlm.training.settings import model_sizes, refuse_changes, run_settings
from groundlm.training.signals import Signals

POLL_S = 0.2

_say = partial(print, file=sys.stderr, flush=True)


class NotFinished(Exception):
    """A run that would have to be trained first."""


class Interrupted(Exception):
    """A signal stopped the training; what was reached is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """The signal."""


def settings_of(run: Run, split: TokenSplit) -> dict[str, Any]:
    """All that decides the numbers of a run on this split, on one CPU process."""
    sizes = model_sizes(run.train, split)
    return run_settings(run.train, sizes, split, 1, torch.device("cpu"))


def finished(run: Run, split: TokenSplit) -> dict[str, Any] | None:
    """What is known of a run on this split that stands at its last step, else None.

    `step`, `tokens`, `seconds`, `tokens_per_s`, `skipped_steps`, the `settings`, `environment` and
    `commit` that it was trained with, its `checkpoint` and that one's SHA-256. A run that was
    scored needs no checkpoint any more: `checkpoint` is None then.

    Raises `UserError` if the folder's run was made with other settings.
    """
    trained = _trained(run)
    if trained is None:
        return None
    _refuse_changes(run, trained["settings"], settings_of(run, split))
    return trained if trained["step"] >= run.train.training.steps else None


def known(run: Run, split: TokenSplit) -> dict[str, Any] | None:
    """`finished`, for a run that ends nothing but itself: `RunFault` where its rate is another."""
    try:
        return finished(run, split)
    except UserError as error:
        raise RunFault(str(error)) from None


def refuse_other_settings(run: Run, split: TokenSplit) -> None:
    """Raise `UserError` if the folder's run was made with other settings, the rate apart.

    Checkpoints are not held against their hashes here, only when they are taken up.
    """
    made = _made_with(run)
    if made is not None:
        rate = "optimizer.learning_rate"
        _refuse_changes(run, made, settings_of(run, split) | {rate: made[rate]})


def _made_with(run: Run) -> dict[str, Any] | None:
    """The settings of a folder's run, from the first place that can be read."""
    for checkpoint in reversed(ckpt.checkpoints(run.folder)):
        with suppress(UserError, KeyError):
            return ckpt.read_progress(checkpoint)["settings"]
    kept = read_scores(run.folder).get("trained")
    return None if kept is None else kept["settings"]


def _refuse_changes(run: Run, old: dict[str, Any], new: dict[str, Any]) -> None:
    try:
        # Ranks, device and backend change rounding alone; what is done may be done elsewhere.
        refuse_changes(run.folder, old, new, regroup=True)
    except UserError as error:
        what = str(error).partition(": ")[0]
        raise UserError(f"{what}: compare it unchanged or choose another --out") from None


def _trained(run: Run) -> dict[str, Any] | None:
    """What is known of a folder's run: of its newest checkpoint, or of a later one that was scored
    and is gone."""
    kept = read_scores(run.folder).get("trained")
    newest = ckpt.newest_whole(run.folder, _say) if run.folder.is_dir() else None
    if newest is None:
        return None if kept is None else kept | {"checkpoint": None}
    if kept is not None and kept["step"] > ckpt.step_of(newest):
        return kept | {"checkpoint": None}
    return _read_trained(newest)


def _read_trained(checkpoint: Path) -> dict[str, Any]:
    progress = ckpt.read_progress(checkpoint)
    figures = progress["figures"]
    return {
        "step": progress["step"],
        "tokens": figures["tokens"],
        "seconds": figures["train_seconds"],
        "tokens_per_s": figures["tokens_per_s"],
        "skipped_steps": figures["skipped_steps"],
        "settings": progress["settings"],
        "environment": progress["environment"],
        "commit": progress.get("commit"),
        "checkpoint": str(checkpoint),
        "checkpoint_sha256": file_sha256(checkpoint / "training" / "complete.json"),
    }


def train(run: Run, split: TokenSplit, launcher: list[str]) -> dict[str, Any]:
    """Train to the last step, if the run is not there yet; returns what `finished` does.

    Raises:
        Interrupted: SIGINT or SIGTERM came; the run can be gone on with.
        RunFault: the run cannot go on: loss not finite, disk full, checkpoints damaged, process
            killed.
        UserError: a launcher that cannot be started.
    """
    if trained := known(run, split):
        return trained
    if launcher:
        _launch(run, launcher)
    else:
        try:
            stopped = run_train(run.train)["interrupted_by"]
        except UserError as error:
            raise RunFault(str(error)) from None
        if stopped:
            raise Interrupted(stopped)
    trained = known(run, split)
    if trained is None:
        raise RunFault(f"{run.folder} did not reach step {run.train.training.steps}")
    return trained


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
