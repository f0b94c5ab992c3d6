"""From a comparison's configuration to the runs it consists of, in the order they are made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groundlm.baselines.matching import match_parameters
from groundlm.cli import parse
from groundlm.comparison.config import CompareConfig, ModelConfig
from groundlm.errors import UserError
from groundlm.evaluation.reading import Reading
from groundlm.models import build_config, build_skeleton, count_parameters
from groundlm.training.config import TrainConfig
from groundlm.training.optim import refuse_fused

LAYERS = "num_hidden_layers"
SHARED = {
    "optimizer": {"learning_rate": "its learning_rate"},
    "training": {
        "out": "out", "seed": "seeds", "stop_at": "training.steps", "steps": "training.steps",
        "batch_size": "training.batch_size",
    },
}  # fmt: skip
"""Options that no model has by itself, and what is to be set instead."""


@dataclass(frozen=True)
class Model:
    """A model of the comparison with its sizes settled."""

    config: ModelConfig
    sizes: dict[str, Any]
    """As for `groundlm.models.build_model`."""
    parameters: dict[str, int]
    """`total`, `embedding` and `rest`."""
    options: dict[str, dict[str, Any]]
    """Its own `optimizer` and `training` options, in the types of their fields."""

    @property
    def name(self) -> str:
        return self.config.name

    def described(self) -> dict[str, Any]:
        """What the results say of the model, whatever its runs."""
        config = build_config(self.sizes)
        return {
            "model": self.name,
            "model_type": config.model_type,
            "layers": getattr(config, LAYERS, None),
            "parameters": self.parameters["total"],
            "embedding_parameters": self.parameters["embedding"],
            "other_parameters": self.parameters["rest"],
            "options": {k: v for k, v in self.options.items() if v},
        }


@dataclass(frozen=True)
class Run:
    """One training of the matrix."""

    model: Model
    seed: int
    train: TrainConfig

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def folder(self) -> Path:
        return Path(self.train.training.out)


def reading(config: CompareConfig) -> Reading:
    """How held-out text is read: disjoint windows of the training length, as in training."""
    data = config.data
    return Reading(data.window_tokens, reset_at_documents=data.reset_at_documents)


def settle_models(config: CompareConfig, vocab_size: int | None) -> list[Model]:
    """Sizes and counts of all models, matched to the target if there is one.

    Without a vocabulary size, which the data brings, only what can be checked before is, and sizes
    are left as they are. Raises `UserError` naming the model whose sizes or options do not fit or
    cannot meet the target.
    """
    models = []
    for entry in config.models:
        try:
            sizes = _preset_sizes(entry) | entry.model
            if vocab_size is not None:
                sizes = {"vocab_size": vocab_size} | sizes
                if config.target_parameters is not None:
                    target, free = config.target_parameters, entry.free
                    sizes = match_parameters(sizes, target, free, config.tolerance)
            model = Model(entry, sizes, count_parameters(sizes), _own_options(entry))
            make_run(config, model, config.seeds[0], config.optimizer.learning_rate).train.check()
            skeleton = build_skeleton(sizes)
            reading(config).check(skeleton)
            if model.options["optimizer"].get("name", config.optimizer.name) == "muon":
                refuse_fused(dict(skeleton.named_parameters()))
            models.append(model)
        except UserError as error:
            text = str(error).replace("--window-tokens", "data.window_tokens")
            raise UserError(f"{entry.name}: {text}") from None
    return models


def _preset_sizes(entry: ModelConfig) -> dict[str, Any]:
    if entry.preset is None:
        return {}
    arguments = ["--config", entry.preset]
    preset: TrainConfig = parse(TrainConfig, arguments, "train", uses_presets=True)
    return preset.model


def _own_options(entry: ModelConfig) -> dict[str, dict[str, Any]]:
    """The entry's options, read as `groundlm train` reads them."""
    sections = {"optimizer": entry.optimizer, "training": entry.training}
    arguments = []
    for section, options in sections.items():
        for name, value in options.items():
            if name in SHARED[section]:
                raise UserError(
                    f"{section}.{name} is not a model's own: set {SHARED[section][name]}"
                )
            arguments.append(
                f"--{section}.{name}={value if type(value) is str else json.dumps(value)}"
            )
    values: TrainConfig = parse(TrainConfig, arguments, "train")
    return {
        section: {name: getattr(getattr(values, section), name) for name in options}
        for section, options in sections.items()
    }


def make_run(config: CompareConfig, model: Model, seed: int, learning_rate: float) -> Run:
    """The run of a model with a seed and a peak learning rate."""
    folder = Path(config.out) / "runs" / f"{model.name}-seed{seed}"
    return Run(model, seed, _train_config(config, model, folder, seed, learning_rate))


def sweep_folder(config: CompareConfig) -> Path:
    """Where short runs lie."""
    return Path(config.sweep.out or Path(config.out) / "sweep")


def sweep_run(config: CompareConfig, model: Model, rate: float) -> Run:
    """The short run of a model at one learning rate."""
    folder = sweep_folder(config) / f"{model.name}-lr{rate!r}"
    train = _train_config(config, model, folder, config.seeds[0], rate)
    steps = config.sweep.steps
    short = replace(train.training, steps=steps, save_every=steps, eval_every=0)
    return Run(model, config.seeds[0], replace(train, training=short))


def in_order(config: CompareConfig, models: list[Model]) -> Iterator[tuple[Model, int]]:
    """Models and seeds so that a whole table is there as early as can be."""
    for seed in config.seeds:
        for model in models:
            yield model, seed


def _train_config(
    config: CompareConfig, model: Model, folder: Path, seed: int, learning_rate: float
) -> TrainConfig:
    own = model.options
    return TrainConfig(
        model=model.sizes,
        data=config.data,
        optimizer=replace(config.optimizer, learning_rate=learning_rate, **own["optimizer"]),
        training=replace(config.training, out=str(folder), seed=seed, **own["training"]),
    )
