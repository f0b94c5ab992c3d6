"""From names and sizes to a model: any transformers causal language model, GPN by default."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from groundlm.errors import UserError, nearest


def build_config(sizes: dict[str, Any]) -> Any:
    """A transformers configuration from `model_type` (default `gpn`) and its sizes.

    Raises `UserError` for an unknown type, an unknown size (with the nearest known one) or a value
    of the wrong type.
    """
    sizes = dict(sizes)
    kind = sizes.pop("model_type", "gpn")
    if kind not in CONFIG_MAPPING:
        raise UserError(f"unknown model_type {kind!r}{nearest(str(kind), CONFIG_MAPPING)}")
    known = {f"model.{name}" for name in CONFIG_MAPPING[kind]().to_dict()}
    for name in sizes:
        if f"model.{name}" not in known:
            raise UserError(f"unknown key model.{name}{nearest(f'model.{name}', known)}")
    if kind == "rwkv":
        sizes |= {
            "rescale_every": 0
        }  # else transformers halves weights in place while it evaluates
    try:
        return AutoConfig.for_model(kind, **sizes)
    except UserError:
        raise
    except Exception as error:  # transformers' validators raise many kinds
        text = " ".join(str(error).split())
        raise UserError(f"model ({kind}): {text}") from None


def build_model(sizes: dict[str, Any], seed: int) -> PreTrainedModel:
    """A model with initial weights that depend on `seed` alone, in float32 on the CPU."""
    config = build_config(sizes)
    devices: list[int] = []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_skeleton(sizes: dict[str, Any]) -> PreTrainedModel:
    """A model without weights (on the device `meta`), to be asked about its kind and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(build_config(sizes))


def count_parameters(sizes: dict[str, Any]) -> dict[str, int]:
    """Parameters without building the weights: `total`, `embedding` and `rest`.

    An untied head, as large as the embedding, counts as embedding.
    """
    model = build_skeleton(sizes)
    total = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    matrices = [model.get_input_embeddings().weight, *([] if head is None else [head.weight])]
    embedding = sum(w.numel() for w in {id(w): w for w in matrices}.values())
    return {"total": total, "embedding": embedding, "rest": total - embedding}


def resolve_device(name: str) -> torch.device:
    """`auto` -> a GPU if there is one, else the CPU; anything else as torch names it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("no numbers there")
    except (RuntimeError, AssertionError):
        raise UserError(f"device {name!r} is not available here") from None
    return device


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, for result files."""
    names = ("groundlm", "torch", "transformers", "tokenizers", "numpy")
    found = {name: metadata.version(name) for name in names}
    return found | {"python": platform.python_version()}
