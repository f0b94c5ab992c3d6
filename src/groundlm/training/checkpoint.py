"""Checkpoints: a transformers model folder that also holds what it takes to go on training.

    checkpoints/step-000100/
        config.json, model.safetensors, tokenizer...      loads with `from_pretrained`
        training/optimizer.safetensors                    AdamW's moments, by parameter name
        training/rng.safetensors                          torch's generators
        training/progress.json                            step, tokens, window, settings of the run

A folder is written under another name and renamed when it is whole, so `step-*` is always complete.
Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groundlm.errors import UserError

PREFIX = "step-"
PARTIAL = ".partial-"


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob(f"{PREFIX}*"), key=lambda p: step_of(p))


def path_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"{PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix(PREFIX))


def save_checkpoint(
    run: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    progress: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `progress["step"]`, then remove all but the newest `keep`."""
    final = path_of(run, progress["step"])
    if final.exists():
        return final
    partial = final.with_name(PARTIAL + final.name)
    shutil.rmtree(partial, ignore_errors=True)
    extra = partial / "training"
    extra.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    save_file(_optimizer_tensors(model, optimizer), extra / "optimizer.safetensors")
    save_file(_rng_tensors(), extra / "rng.safetensors")
    (extra / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")
    _sync(partial)
    os.replace(partial, final)
    for old in checkpoints(run)[:-keep]:
        shutil.rmtree(old)
    return final


def load_progress(checkpoint: Path) -> dict[str, Any]:
    """Step, tokens and settings that the checkpoint was written with."""
    path = checkpoint / "training" / "progress.json"
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be continued: {path}: {error}") from None


def load_training_state(checkpoint: Path, model: PreTrainedModel, optimizer: Optimizer) -> None:
    """Put weights, optimizer moments and generators back as they were, in place.

    Raises `UserError` naming the file and the tensor when something is missing or misshapen.
    """
    saved = {}
    for file in ("optimizer.safetensors", "rng.safetensors"):
        path = checkpoint / "training" / file
        try:
            saved[file] = load_file(path)
        except Exception as error:
            raise UserError(f"checkpoint file {path} cannot be read: {error}") from None
    moments = saved["optimizer.safetensors"]
    for name, parameter in model.named_parameters():
        state = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            tensor = moments.get(f"{name}.{key}")
            want = torch.Size([]) if key == "step" else parameter.shape
            if tensor is None or tensor.shape != want:
                have = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                where = checkpoint / "training" / "optimizer.safetensors"
                raise UserError(f"{where}: {name}.{key} is {have}, expected {tuple(want)}")
            state[key] = tensor.to(parameter.device)
        optimizer.state[parameter] = state
    _set_rng(saved["rng.safetensors"])


def _optimizer_tensors(model: PreTrainedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _rng_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for i in range(min(torch.cuda.device_count(), len(states) - 1)):
            torch.cuda.set_rng_state(states[f"cuda.{i}"], i)


def _sync(folder: Path) -> None:
    """Flush every file and the folders themselves, so that the rename never outruns the data."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
