"""From a model folder to a model, or to one line that says what is wrong with the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from groundlm.errors import UserError
from groundlm.model.alignment import align_weights

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
"""Weight dtypes by the names that the command line takes; `auto` is the dtype on disk."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_model(
    folder: str | Path, dtype: str = "auto", device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """A causal language model of any type from a transformers folder, in eval mode.

    Every weight comes from the folder: nothing is left at an initial value. `dtype` is a name of
    `DTYPES`; a GPN keeps its norms, biases and decay in float32 in any case.

    Raises:
        UserError: in one line, with the file and where it applies the tensor: a folder or file
            that is missing or damaged, an unknown model type, sizes that no model has, a tensor
            that is missing, left over, misshapen or not finite.
    """
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = Path(folder)
    _check_config(folder)
    files = _check_files(folder)
    _check_fit(folder, files)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it would warn of is raised below
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    except Exception as error:  # transformers and its validators raise many kinds
        raise UserError(f"model {folder} cannot be loaded: {one_line(error)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_report(folder, files, report)
    _check_finite(folder, files, model)
    align_weights(model)
    return model.to(device).eval()


def one_line(error: BaseException) -> str:
    """The message of an exception without its line breaks, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None


def _check_config(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"no model in {folder}: config.json is missing")
    config = _read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{path}: model_type {kind!r} is not known here")


def _check_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor, by name; each file has been opened and its length compared."""
    if (folder / INDEX).is_file():
        placed = _read_json(folder / INDEX).get("weight_map", {})
        names = sorted(set(placed.values()))
    else:
        placed, names = {}, [WEIGHTS]
    files: dict[str, Path] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing")
        try:
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError, ValueError) as error:
            size = path.stat().st_size
            raise UserError(f"{path} is damaged ({size} bytes): {one_line(error)}") from None
    for key, name in placed.items():
        if key not in files:
            raise UserError(f"{folder / name}: tensor {key} is missing")
    return files


def _check_fit(folder: Path, files: dict[str, Path]) -> None:
    """Refuse weights of quite another model before memory for the missing ones is asked for."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(f"{config.model_type!r} is no causal language model")
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(config).state_dict()
    except Exception as error:  # transformers' own checks raise many kinds
        raise UserError(f"{folder / 'config.json'}: {one_line(error)}") from None
    missing = [key for key in expected if key not in files]
    wanted_bytes = sum(expected[key].numel() for key in missing)
    if wanted_bytes > sum(path.stat().st_size for path in set(files.values())):
        where = next(iter(files.values()), folder)
        kind = config.model_type
        raise UserError(
            f"{where} holds no weights of this {kind}: tensor {missing[0]} is missing"
            f"{_more(missing)}"
        )


def _check_report(folder: Path, files: dict[str, Path], report: dict[str, Any]) -> None:
    where = next(iter(files.values()), folder) if len(set(files.values())) == 1 else folder
    for key in sorted(report["missing_keys"]):
        raise UserError(f"{where}: tensor {key} is missing{_more(report['missing_keys'])}")
    for key, have, want in sorted(report["mismatched_keys"]):
        shapes = f"has shape {tuple(have)}, expected {tuple(want)}"
        raise UserError(f"{files.get(key, where)}: tensor {key} {shapes}")
    for key in sorted(report["unexpected_keys"]):
        rest = _more(report["unexpected_keys"])
        raise UserError(f"{files.get(key, where)}: tensor {key} belongs to no part of it{rest}")
    for message in report.get("error_msgs", ()):
        raise UserError(f"model {folder} cannot be loaded: {' '.join(str(message).split())}")


def _more(names: Any) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_finite(folder: Path, files: dict[str, Path], model: PreTrainedModel) -> None:
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise UserError(
                f"{files.get(key, folder)}: tensor {key} has {bad} numbers that are not finite"
            )
