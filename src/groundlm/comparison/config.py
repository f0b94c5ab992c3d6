"""What a comparison is told: its models, what they share, and in which they may differ."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from groundlm.errors import UserError, nearest
from groundlm.training.config import DataConfig, OptimizerConfig, TrainingConfig

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class ModelConfig:
    """One model of the comparison."""

    name: str
    """What it is called in tables and folders: letters, digits and `. _ + -`."""
    preset: str | None = None
    """Preset or YAML file whose `model` section it has; the other sections are not looked at."""
    model: dict[str, Any] = field(default_factory=dict)
    """Sizes, over those of the preset; `vocab_size` is the data's."""
    learning_rate: float | None = None
    """Its own peak learning rate; such a model takes no part in the sweep."""
    learning_rate_of: str | None = None
    """Take the rate of this model of the comparison, of the same family, say."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Options over those of `optimizer`, such as `name: muon`."""
    training: dict[str, Any] = field(default_factory=dict)
    """Options over those of `training` that leave its tokens alone, such as `micro_batch_size`,
    `truncate_tokens` or `carry_state`."""
    free: str | None = None
    """The size that is set to meet `target_parameters`. None: ffn width, for Mamba-2 the state."""


@dataclass(frozen=True)
class SweepConfig:
    """Learning rates tried on short runs of each model, with the first seed."""

    learning_rates: list[float] = field(default_factory=list)
    """Peak rates to try; none: no sweep."""
    steps: int = 200
    """Optimizer steps of each short run, its schedule as long."""
    windows: int = 64
    """Windows of the training split, unread in the short run, whose loss decides; whole batches."""
    extend: int = 0
    """While the best rate lies at the edge, try up to so many further ones, each beyond it by the
    ratio of the two outermost."""
    out: str | None = None
    """Folder of the short runs and of what they gave; comparisons that share it share that. None:
    `sweep` in the comparison's folder."""


@dataclass(frozen=True)
class CompareConfig:
    """Train models at equal tokens and parameters, score them, and write a table.

    Runs that are done are kept: the same command goes on where it stopped, also with more models or
    seeds. docs/comparison.md says what is written.
    """

    models: list[ModelConfig]
    """The models in order of importance: all of them with the first seed, then with the next."""
    reference: str
    """Name of the model that gaps in percent are relative to."""
    only: list[str] = field(default_factory=list)
    """Names of the models to make; none: all. The table shows these."""
    out: str = "runs/compare"
    """Folder of the table, the numbers, the plots and the runs."""
    seeds: list[int] = field(default_factory=lambda: [1])
    """Seeds of initial weights and order of the windows; each model is trained with each."""
    target_parameters: int | None = None
    """Parameters that each model is given by its free width. None: sizes stay as they are."""
    tolerance: float = 0.01
    """How far from the target a model may be, as a fraction of it."""
    data: DataConfig = field(default_factory=DataConfig)
    """Tokens and windows, for training and for scoring."""
    prepare: dict[str, Any] = field(default_factory=dict)
    """Options of `groundlm prepare` that make `data.path` where it does not exist yet."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and schedule of all models; `learning_rate` for those without one of their own."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length, batch and files of all runs; folder and seed are set by the comparison."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Search for learning rates."""
    lambada: str | None = None
    """LAMBADA passages to score: a JSONL file with the field `text`, or a data set on the hub."""
    eval_batch_size: int = 16
    """Windows or passages scored side by side."""
    launcher: list[str] = field(default_factory=list)
    """Command that starts each training in place of this process, such as `torchrun --standalone
    --nproc-per-node 8 -m groundlm`."""

    def check(self) -> None:
        """Refuse what no comparison can be; raises `UserError` naming the option."""
        if not self.models:
            raise UserError("models names nothing")
        counts = Counter(model.name for model in self.models)
        for name, count in counts.items():
            if not NAME.fullmatch(name):
                raise UserError(f"models: {name!r} is no name of letters, digits and . _ + -")
            if count > 1:
                raise UserError(f"models: {name} is there {count} times")
        if self.reference not in counts:
            known = nearest(self.reference, counts)
            raise UserError(f"reference {self.reference!r} is none of the models{known}")
        for name in self.only:
            if name not in counts:
                raise UserError(f"only: {name!r} is none of the models{nearest(name, counts)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds is {self.seeds}: give one or several, each once")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance is {self.tolerance}: it must lie between 0 and 1")
        if self.target_parameters is not None and self.target_parameters < 1:
            raise UserError(f"target_parameters is {self.target_parameters}: it must be above 0")
        if self.eval_batch_size < 1:
            raise UserError(f"eval_batch_size is {self.eval_batch_size}: it must be at least 1")
        if "out" in self.prepare:
            raise UserError("prepare.out is not for a comparison: set data.path")
        self._check_training()
        self._check_rates()
        self._check_rates_of_others()

    def _check_training(self) -> None:
        for name, here in (("out", "out"), ("seed", "seeds"), ("stop_at", "training.steps")):
            if getattr(self.training, name) != getattr(TrainingConfig(), name):
                raise UserError(f"training.{name} is not for a comparison: set {here}")

    def _check_rates(self) -> None:
        own = [m.learning_rate for m in self.models if m.learning_rate is not None]
        for rate in [*own, *self.sweep.learning_rates]:
            if not 0 < rate < math.inf:
                raise UserError(f"learning rate {rate}: it must be above 0")
        rates = self.sweep.learning_rates
        if len(set(rates)) < len(rates):
            raise UserError(f"sweep.learning_rates is {rates}: give each once")
        for name, least in (("steps", 1), ("windows", 1), ("extend", 0)):
            value = getattr(self.sweep, name)
            if value < least:
                raise UserError(f"sweep.{name} is {value}: it must be at least {least}")
        if self.sweep.extend and len(rates) < 2:
            raise UserError("sweep.extend needs two learning rates, whose ratio it goes on with")

    def _check_rates_of_others(self) -> None:
        by_name = {model.name: model for model in self.models}
        for model in self.models:
            other = model.learning_rate_of
            if other is None:
                continue
            if model.learning_rate is not None:
                raise UserError(f"{model.name} has both learning_rate and learning_rate_of")
            if other not in by_name:
                known = nearest(other, by_name)
                raise UserError(f"{model.name}: learning_rate_of {other!r} is no model{known}")
            if by_name[other].learning_rate_of is not None:
                raise UserError(
                    f"{model.name}: learning_rate_of {other}, which has another model's itself"
                )

    def as_dict(self) -> dict[str, Any]:
        """Everything, filled in, for a file."""
        return dataclasses.asdict(self)
