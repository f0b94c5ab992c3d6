"""Everything a training run is told, one frozen section per concern."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from groundlm.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are read, and in what windows."""

    path: str = "data/pydocs"
    """Folder written by `groundlm prepare`."""
    window_tokens: int = 2048
    """Tokens per training window; back-propagation runs through the whole window."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule: linear warm-up, then a cosine down to a fraction of the peak."""

    learning_rate: float = 6e-4
    """Peak learning rate."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    warmup_steps: int = 100
    """Optimizer steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    eps: float = 1e-8
    """Added to the denominator of AdamW's step."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on tensors of two or more dimensions only."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at once, and what is written when."""

    out: str = "runs/default"
    """Folder of the run; a folder that holds checkpoints of the same run is continued."""
    steps: int = 10000
    """Optimizer steps of the whole schedule."""
    stop_at: int | None = None
    """Stop after this step with a checkpoint, leaving the schedule as it is."""
    batch_size: int = 128
    """Windows per optimizer step."""
    micro_batch_size: int | None = None
    """Windows per forward and backward pass; their gradients add up. None: the whole batch."""
    seed: int = 1
    """Seed of the initial weights and of the order of the windows."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16` multiplies matrices in bfloat16 (autocast); weights, state and loss stay float32."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
    scan_backend: str = "auto"
    """How a GPN's recurrence is walked (`auto`, or a name of `groundlm.ops.BACKENDS`)."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 500
    """Steps between held-out evaluations; 0 evaluates at the end only."""
    eval_windows: int = 64
    """Held-out windows of each evaluation during training; 0 takes all."""
    save_every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; older ones are removed after a new one is complete."""

    # What may change between the stop and the continuation of a run without changing its result.
    FREE = ("out", "stop_at", "device", "log_every", "eval_every", "eval_windows", "save_every",
            "keep_checkpoints", "scan_backend")  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model on prepared tokens."""

    model: dict[str, Any] = field(default_factory=dict)
    """Model sizes by name, e.g. `--model.state_size 256`; `model_type` (default `gpn`) picks the \
architecture. `vocab_size` is taken from the data when left out."""
    data: DataConfig = DataConfig()
    """Tokens and windows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    training: TrainingConfig = TrainingConfig()
    """Length, batch, checkpoints."""

    def check(self) -> None:
        """Refuse values that no run can have, by name."""
        for name, least in (("steps", 1), ("batch_size", 1), ("log_every", 1), ("save_every", 1),
                            ("eval_every", 0), ("eval_windows", 0), ("keep_checkpoints", 1)):  # fmt: skip
            _at_least(f"training.{name}", getattr(self.training, name), least)
        if self.training.stop_at is not None:
            _at_least("training.stop_at", self.training.stop_at, 1)
        _at_least("data.window_tokens", self.data.window_tokens, 1)
        for name in ("learning_rate", "weight_decay", "clip_norm", "warmup_steps", "eps"):
            _at_least(f"optimizer.{name}", getattr(self.optimizer, name), 0)
        for name in ("final_fraction", "beta1", "beta2"):
            value = getattr(self.optimizer, name)
            if not 0 <= value <= 1:
                raise UserError(f"optimizer.{name} is {value}: it must lie between 0 and 1")
        t = self.training
        if t.micro_batch_size is not None:
            _at_least("training.micro_batch_size", t.micro_batch_size, 1)
            if t.batch_size % t.micro_batch_size:
                raise UserError(
                    f"training.batch_size {t.batch_size} is not a multiple of "
                    f"training.micro_batch_size {t.micro_batch_size}"
                )

    def fixed(self) -> dict[str, Any]:
        """Flat `section.field` -> value of all that decides the numbers of a run."""
        flat = {
            f"{section}.{name}": value
            for section, values in asdict(self).items()
            for name, value in values.items()
        }
        free = {"data.path", *(f"training.{name}" for name in self.training.FREE)}
        return {k: v for k, v in flat.items() if k not in free}


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"{name} is {value}: it must be at least {least}")
