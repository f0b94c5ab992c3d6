"""The file of a state: one safetensors file that names its sizes and its model's weights."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from groundlm.errors import UserError
from groundlm.model.alignment import aligned

FILE_KIND = "groundlm-state"
STATE_SIZES = ("state_size", "num_heads", "head_k_dim", "head_v_dim")
"""Sizes that every file names; the last two only with a memory."""
MODEL_SIZES = ("vocab_size", "embedding_size", "ffn_size", "num_layers")
"""Sizes of the model that a file names beside the state's own, if the model was at hand."""
WEIGHTS = "weights"
"""Entry that holds the `fingerprint` of the model's weights."""
FINGERPRINT_NUMBERS = 64
"""Numbers of each weight that a fingerprint covers."""


def write(path: str | Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write the file, complete or not at all; `facts` are sizes and perhaps a fingerprint."""
    # Copies: a file holds no two names of one tensor. One entry of metadata: several would be
    # written in an order that changes from run to run.
    copies = {k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    data = save(copies, {FILE_KIND: json.dumps(facts)})
    check_writable(path)
    partial = _partial(path)
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, int], str | None]:
    """Tensors, sizes and fingerprint (if the file has one), held against each other.

    Raises `UserError` naming the file and the tensor.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()  # the numbers of what follows must be those of the kept state
            tensors = {n: aligned(file.get_tensor(n)) for n in names}
    except (OSError, SafetensorError) as error:
        raise UserError(f"state {path} cannot be read: {error}") from None
    if FILE_KIND not in metadata:
        raise UserError(f"{path} is no GPN state: its metadata has no {FILE_KIND!r}")
    sizes, weights = _read_facts(metadata[FILE_KIND], f"state {path}")
    _check_tensors(tensors, sizes, f"state {path}")
    return tensors, sizes, weights


def fingerprint(model: nn.Module) -> str:
    """16 hex digits of the first numbers of every weight, the same in every dtype they load in."""
    count = FINGERPRINT_NUMBERS
    first = [p.detach().flatten()[:count].float().bfloat16() for p in model.parameters()]
    numbers = torch.cat(first).cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(numbers).hexdigest()[:16]


def check_writable(path: str | Path) -> None:
    """Raise `UserError` if `GPNState.save` could not write there."""
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _partial(path).touch()
        _partial(path).unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _partial(path: str | Path) -> Path:
    return Path(f"{path}.partial")


def _unwritable(path: str | Path, error: OSError) -> UserError:
    return UserError(f"state {path} cannot be written: {error.strerror}")


def _read_facts(text: str, what: str) -> tuple[dict[str, int], str | None]:
    """Sizes and fingerprint from the metadata of a state file."""
    try:
        facts = dict(json.loads(text))
        weights = facts.pop(WEIGHTS, None)
        needed = STATE_SIZES if facts["num_heads"] else STATE_SIZES[:2]
        known = {*needed, *MODEL_SIZES}
        plain = all(type(size) is int and size >= 0 for size in facts.values())
        sound = plain and set(needed) <= facts.keys() <= known
        sound = sound and isinstance(weights, str | None)
    except (ValueError, TypeError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{what} is damaged: its metadata does not hold the sizes of a GPN state")
    return facts, weights


def _check_tensors(tensors: dict[str, Tensor], sizes: dict[str, int], what: str) -> None:
    """Raise `UserError`, naming the tensor, unless they are those of a state of these sizes."""
    shape_D = (sizes["state_size"],)
    rest = {"predicted_BD": shape_D, "grounded_BD": shape_D, "tokens_seen": ()}
    if sizes["num_heads"]:
        rest["memory_BHKV"] = tuple(sizes[name] for name in STATE_SIZES[1:])
    for name in (n for n in rest if n not in tensors):
        raise UserError(f"{what} is damaged: it has no {name}")
    rest |= {"text_hash_B": (), "hash_before_B": ()}
    first = tensors["predicted_BD"]
    batch = first.shape[:1] if first.dim() == 2 else tensors["tokens_seen"].shape[:1]
    real = first.dtype if first.is_floating_point() else torch.float32
    for name, tensor in tensors.items():
        if name not in rest:
            raise UserError(f"{what} is damaged: {name} is no part of it")
        shape = (*batch, *rest[name])
        if tensor.shape != shape:
            have = f"has shape {tuple(tensor.shape)}, expected {shape}"
            raise UserError(f"{what} is damaged: {name} {have}")
        dtype = real if rest[name] else torch.int64
        if tensor.dtype != dtype:
            raise UserError(f"{what} is damaged: {name} is {tensor.dtype}, expected {dtype}")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{what} is damaged: {name} has numbers that are not finite")
        if name == "tokens_seen" and bool((tensor < 0).any()):
            raise UserError(f"{what} is damaged: {name} counts below 0")
