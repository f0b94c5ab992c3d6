"""From a comparison's configuration to the runs it consists of, in the order they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groundlm.baselines.matching import match_parameters
from groundlm.cli import parse
from groundlm.comparison.config import CompareConfig, ModelConfig
from groundlm.errors import UserError
from groundlm.models import build_config, count_parameters
from groundlm.training.config import TrainConfig

LAYERS = "num_hidden_layers"


@dataclass(frozen=True)
class Model:
    """A model of the comparison with its sizes settled."""

    config: ModelConfig
    sizes: dict[str, Any]
    """As for `groundlm.models.build_model`."""
    parameters: dict[str, int]
    """`total`, `embedding` and `rest`."""

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


def settle_models(config: CompareConfig, vocab_size: int) -> list[Model]:
    """Sizes and counts of all models, matched to the target if there is one.

    Raises `UserError` naming the model whose sizes do not fit or cannot meet the target.
    """
    models = []
    for entry in config.models:
        try:
            sizes = _preset_sizes(entry) | {"vocab_size": vocab_size} | entry.model
            if config.target_parameters is not None:
                target, free = config.target_parameters, entry.free
                sizes = match_parameters(sizes, target, free, config.tolerance)
            models.append(Model(entry, sizes, count_parameters(sizes)))
        except UserError as error:
            raise UserError(f"{entry.name}: {error}") from None
    return models


def _preset_sizes(entry: ModelConfig) -> dict[str, Any]:
    if entry.preset is None:
        return {}
    arguments = ["--config", entry.preset]
    preset: TrainConfig = parse(TrainConfig, arguments, "train", uses_presets=True)
    return preset.model


def make_run(config: CompareConfig, model: Model, seed: int, learning_rate: float) -> Run:
    """The run of a model with a seed and a peak learning rate."""
    folder = Path(config.out) / "runs" / f"{model.name}-seed{seed}"
    return Run(model, seed, _train_config(config, model, folder, seed, learning_rate))


def sweep_runs(config: CompareConfig, model: Model) -> dict[float, Run]:
    """The short runs that find a model's learning rate, by rate."""
    runs = {}
    for rate in config.sweep.learning_rates:
        folder = Path(config.out) / "sweep" / f"{model.name}-lr{rate:g}"
        train = _train_config(config, model, folder, config.seeds[0], rate)
        steps = config.sweep.steps
        short = replace(train.training, steps=steps, save_every=steps, eval_every=0)
        runs[rate] = Run(model, config.seeds[0], replace(train, training=short))
    return runs


def in_order(config: CompareConfig, models: list[Model]) -> Iterator[tuple[Model, int]]:
    """Models and seeds so that a whole table is there as early as can be."""
    for seed in config.seeds:
        for model in models:
            yield model, seed


def _train_config(
    config: CompareConfig, model: Model, folder: Path, seed: int, learning_rate: float
) -> TrainConfig:
    names = ("micro_batch_size", "truncate_tokens")
    own = {name: getattr(model.config, name) for name in names}
    own = {name: value for name, value in own.items() if value is not None}
    return TrainConfig(
        model=model.sizes,
        data=config.data,
        optimizer=replace(config.optimizer, learning_rate=learning_rate),
        training=replace(config.training, out=str(folder), seed=seed, **own),
    )
