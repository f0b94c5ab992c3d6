"""What a run's numbers depend on, and whether a run may be continued with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError
from groundlm.models import versions
from groundlm.ops.scan import resolve_backend
from groundlm.training.config import TrainConfig

REGROUPED = (
    "training.micro_batch_size",
    "training.ranks",
    "training.device",
    "training.scan_backend",
)
"""Settings that change the rounding of a run and nothing else."""


def model_sizes(config: TrainConfig, split: TokenSplit) -> dict[str, Any]:
    """The model section with vocabulary and end-of-document token taken from the data.

    Raises `UserError` when a stated one is not the data's.
    """
    found = {"vocab_size": split.vocab_size, "eos_token_id": split.eos_token_id}
    for name, value in found.items():
        stated = config.model.get(name)
        if stated is not None and stated != value:
            raise UserError(
                f"model.{name} is {stated}, the tokens of {config.data.path} have {value}"
            )
    return {"model_type": "gpn"} | config.model | found


def run_settings(
    config: TrainConfig,
    sizes: dict[str, Any],
    split: TokenSplit,
    ranks: int,
    device: torch.device,
) -> dict[str, Any]:
    """Flat `section.field` -> value of all that decides the numbers of a run."""
    gpn = sizes["model_type"] == "gpn"
    backend = resolve_backend(config.training.scan_backend) if gpn else None
    tokens = split.manifest.tokenizer.sha256 + split.info.content_sha256()
    return (
        config.fixed()
        | {f"model.{name}": value for name, value in sizes.items()}
        | {
            "data.sha256": hashlib.sha256(tokens.encode()).hexdigest(),
            "training.ranks": ranks,
            "training.device": device.type,
            "training.scan_backend": backend,
        }
    )


def environment(device: torch.device) -> dict[str, str | int]:
    """What else the last bits of a run depend on."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    return {**versions(), "hardware": name, "threads": torch.get_num_threads()}


def refuse_changes(folder: Path, old: dict[str, Any], new: dict[str, Any], regroup: bool) -> None:
    """Raises `UserError` naming the first setting that differs; `regroup` allows REGROUPED ones."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and not (regroup and name in REGROUPED):
            hint = " (--training.regroup allows it)" if name in REGROUPED else ""
            raise UserError(
                f"{folder} was trained with {name} = {old.get(name)}, not {new.get(name)}: "
                f"continue it unchanged or choose another --training.out{hint}"
            )
