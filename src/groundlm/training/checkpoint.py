"""Checkpoints: a transformers model folder that also holds what it takes to go on training.

    checkpoints/step-000100/
        config.json, model.safetensors, tokenizer...      loads with `from_pretrained`
        ema/                                              the averaged weights, likewise (if kept)
        training/optimizer.safetensors                    moments, by parameter name
        training/state.safetensors                        carried state (if carried)
        training/progress.json                            step, figures, settings of the run
        training/complete.json                            size of every file, written last

A folder is written under another name, flushed, and renamed when it is whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from groundlm.errors import RunFault, UserError

PREFIX = "step-"
PARTIAL = ".partial-"


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"{PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, oldest first, damaged ones included."""
    return sorted((run / "checkpoints").glob(f"{PREFIX}*"), key=step_of)


def newest_complete(run: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are all there in full; says which ones it passes over."""
    for checkpoint in reversed(checkpoints(run)):
        damage = what_is_missing(checkpoint)
        if damage is None:
            return checkpoint
        say(f"passing over {checkpoint}: {damage}")
    return None


def what_is_missing(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that is missing or of another size, or None."""
    marker = checkpoint / "training" / "complete.json"
    try:
        sizes = json.loads(marker.read_text())
    except (OSError, json.JSONDecodeError):
        return f"{marker.name} is missing or damaged"
    for name, size_bytes in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size_bytes:
            return f"{name} has {path.stat().st_size:,} bytes, not {size_bytes:,}"
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
        sizes = {p.relative_to(partial).as_posix(): p.stat().st_size for p in files}
        _write_json(partial / "training" / "complete.json", sizes)
        _flush(partial)
        if final.exists():  # a damaged one that was passed over
            shutil.rmtree(final)
        os.replace(partial, final)
        _flush_folder(final.parent)
    except (OSError, SafetensorError, UserError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = newest_complete(run, lambda _: None)
        raise RunFault(
            f"checkpoint {final} could not be written: {error}; last complete one: {kept or 'none'}"
        ) from None
    return final


def rotate(run: Path, newest: int, every: int | None, best_step: int | None) -> None:
    """Remove checkpoints that are none of the newest, the best, or a multiple of `every`."""
    found = checkpoints(run)
    for checkpoint in found[:-newest]:
        step = step_of(checkpoint)
        if step != best_step and not (every and step % every == 0):
            shutil.rmtree(checkpoint)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Step, figures and settings that the checkpoint was written with."""
    path = checkpoint / "training" / "progress.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be continued: {path}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; `UserError` naming the file if it is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint file {path} cannot be read: {error}") from None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


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
