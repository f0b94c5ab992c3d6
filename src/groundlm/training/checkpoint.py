"""Checkpoints: a transformers model folder that also holds what it takes to go on training.

    checkpoints/step-000100/
        config.json, model.safetensors, tokenizer...      loads with `from_pretrained`
        ema/                                              the averaged weights, likewise (if kept)
        training/optimizer.safetensors                    moments, by parameter name
        training/state.safetensors                        carried state (if carried)
        training/progress.json                            step, figures, settings of the run
        training/complete.json                            SHA-256 of every file, written last

A folder is written under another name, flushed, and renamed when it is whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from groundlm.data.integrity import file_sha256
from groundlm.errors import RunFault, UserError

PREFIX, PARTIAL, DAMAGED = "step-", ".partial-", ".damaged-"
NAME = re.compile(rf"{PREFIX}(\d+)")


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"{PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run by step, damaged ones included; other names are not ours."""
    found = (run / "checkpoints").glob(f"{PREFIX}*")
    return sorted((p for p in found if NAME.fullmatch(p.name)), key=step_of)


def newest_whole(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are all there with the content that was written.

    Newer ones that are damaged are named through `say`, and get a name beginning with `.damaged-`,
    so that they count as checkpoints no more. Where none is whole, all keep their names.

    Raises `RunFault` if the folder cannot be changed.
    """
    damaged: list[Path] = []
    for checkpoint in reversed(checkpoints(run)):
        damage = what_is_damaged(checkpoint)
        if damage is None:
            for path in damaged:
                _set_aside(path)
            return checkpoint
        say(f"passing over {checkpoint}: {damage}")
        damaged.append(checkpoint)
    return None


def _set_aside(checkpoint: Path) -> None:
    try:
        checkpoint.rename(_free_name(checkpoint.with_name(DAMAGED + checkpoint.name)))
    except OSError as error:
        raise RunFault(f"damaged {checkpoint} cannot be renamed: {error}") from None


def what_is_damaged(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that is missing or has other content, or None."""
    marker = checkpoint / "training" / "complete.json"
    try:
        sums = json.loads(marker.read_text("utf-8"))
        names = list(sums.items())
    except (OSError, ValueError, AttributeError):
        return f"{marker.name} is missing or damaged"
    for name, sha256 in names:
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if file_sha256(path) != sha256:
                return f"{name} ({path.stat().st_size:,} bytes) is damaged"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def write(
    run: Path,
    step: int,
    fill: Callable[[Path], None],
    progress: dict[str, Any],
) -> Path:
    """Write the checkpoint of a step, whole or not at all.

    `fill` writes models and tensors into a folder. Raises `RunFault` when the disk does not take
    it; what was there before is intact.
    """
    final = path_of(run, step)
    partial = final.with_name(PARTIAL + final.name)
    try:
        _remove_leftovers(final.parent)
        (partial / "training").mkdir(parents=True)
        fill(partial)
        _write_json(partial / "training" / "progress.json", progress)
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        sums = {p.relative_to(partial).as_posix(): file_sha256(p) for p in files}
        _write_json(partial / "training" / "complete.json", sums)
        _flush(partial)
        os.replace(partial, final)
        _flush_folder(final.parent)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = next(reversed(checkpoints(run)), None)
        raise RunFault(
            f"checkpoint {final} could not be written: {error}; last whole one: {kept or 'none'}"
        ) from None
    return final


def rotate(run: Path, newest: int, every: int | None, best_step: int | None) -> None:
    """Remove checkpoints that are none of the newest, the best, or a multiple of `every`."""
    for checkpoint in checkpoints(run)[:-newest]:
        step = step_of(checkpoint)
        if step != best_step and not (every and step % every == 0):
            # What cannot be removed costs room, not the run.
            shutil.rmtree(checkpoint, ignore_errors=True)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Step, figures and settings that the checkpoint was written with."""
    path = checkpoint / "training" / "progress.json"
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be continued: {path}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; `UserError` naming the file if it is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint file {path} cannot be read: {error}") from None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", "utf-8")


def _free_name(path: Path) -> Path:
    """The path, or the first of `path.1`, `path.2`, ... that does not exist."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _remove_leftovers(folder: Path) -> None:
    """Clear what a killed or failed save left behind."""
    for leftover in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)


def _flush(folder: Path) -> None:
    """Bring every file to the disk, so that the rename never outruns the data."""
    for path in folder.rglob("*"):
        _flush_folder(path)
    _flush_folder(folder)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
