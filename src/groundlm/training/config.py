"""Everything a training run is told, one frozen section per concern."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from groundlm.data.windows import SEEDS
from groundlm.errors import UserError


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are read, and in what windows."""

    path: str = "data/pydocs"
    """Folder written by `groundlm prepare`."""
    window_tokens: int = 2048
    """Tokens per training window; back-propagation runs through the whole window."""
    reset_at_documents: bool = False
    """Start from the zero state at every end-of-document token: a document is read after that \
token alone, nothing flows between documents (GPN only)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule: a linear warm-up, then down from the peak."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` takes the matrices (not the embeddings) with Muon, all else with AdamW; not for models
    that store several matrices as one (gated_delta_net, mamba2, gpt2)."""
    schedule: Literal["cosine", "linear_to_zero"] = "cosine"
    """`cosine` falls to `final_fraction` of the peak, `linear_to_zero` on a line to zero."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    final_fraction: float = 0.1
    """Learning rate at the last step of `cosine`, as a fraction of the peak."""
    warmup_steps: int = 100
    """Optimizer steps of linear warm-up."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    eps: float = 1e-8
    """Added to the denominator of AdamW's step."""
    momentum: float = 0.95
    """Muon's momentum."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on tensors of two or more dimensions only."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""


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
    """Seed of the initial weights, of the order of the windows, and of any dropout."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16` multiplies matrices in bfloat16 (autocast); weights, state and loss stay float32."""
    truncate_tokens: int | None = None
    """Cut back-propagation every so many tokens inside a window; the state runs on. None: full \
back-propagation through the window (GPN only)."""
    carry_state: bool = False
    """Each row of the batch reads its own stretch of the corpus in order and starts a window from \
the state at the end of the one before, gradient cut there (GPN only)."""
    ema_decay: float = 0.0
    """Keep an average of the weights with this decay, scored and saved beside them (in `ema/` of \
a checkpoint). 0: none."""
    max_skipped_steps: int = 10
    """Steps in a row whose loss or gradient is not finite, each skipped, before the run ends."""
    regroup: bool = False
    """Allow a run to go on with other ranks, micro-batches, device or scan backend: same batches, \
other rounding."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU if there is one."""
    scan_backend: str = "auto"
    """How a GPN's recurrence is walked (`auto`, or a name of `groundlm.ops.BACKENDS`)."""
    log: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Also send the metrics to this tracker (an optional package)."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: int = 500
    """Steps between held-out evaluations; 0 evaluates at the end only."""
    eval_windows: int = 64
    """Held-out windows of each evaluation during training; 0 takes all."""
    save_every: int = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; others are removed after a new one is complete."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest held-out loss (among those evaluated when saved)."""
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this."""

    # What may change between the stop and the continuation of a run without changing its result.
    FREE = (
        "out", "stop_at", "max_skipped_steps", "regroup", "log", "log_every", "eval_every",
        "eval_windows", "save_every", "keep_checkpoints", "keep_best", "keep_every",
    )  # fmt: skip


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
        t = self.training
        _at_least("data.window_tokens", self.data.window_tokens, 1)
        for name in ("steps", "batch_size", "log_every", "save_every", "keep_checkpoints",
                     "max_skipped_steps"):  # fmt: skip
            _at_least(f"training.{name}", getattr(t, name), 1)
        for name in ("stop_at", "micro_batch_size", "truncate_tokens", "keep_every"):
            if getattr(t, name) is not None:
                _at_least(f"training.{name}", getattr(t, name), 1)
        for name in ("eval_every", "eval_windows"):
            _at_least(f"training.{name}", getattr(t, name), 0)
        if not 0 <= t.seed < SEEDS:
            raise UserError(f"training.seed is {t.seed}: it must lie in [0, {SEEDS})")
        o = self.optimizer
        for name in ("learning_rate", "weight_decay", "clip_norm", "warmup_steps"):
            _at_least(f"optimizer.{name}", getattr(o, name), 0)
        if not 0 < o.eps < math.inf:
            raise UserError(f"optimizer.eps is {o.eps}: it must be above 0")
        if not 0 <= o.final_fraction <= 1:
            raise UserError(
                f"optimizer.final_fraction is {o.final_fraction}: it must lie between 0 and 1"
            )
        decays = {f"optimizer.{n}": getattr(o, n) for n in ("beta1", "beta2", "momentum")}
        for name, value in (decays | {"training.ema_decay": t.ema_decay}).items():
            if not 0 <= value < 1:
                raise UserError(f"{name} is {value}: it must be at least 0 and below 1")
        kind = self.model.get("model_type", "gpn")
        only_gpn = {
            "training.carry_state": t.carry_state,
            "training.truncate_tokens": t.truncate_tokens,
            "data.reset_at_documents": self.data.reset_at_documents,
        }
        for name, value in only_gpn.items():
            if value and kind != "gpn":
                raise UserError(f"{name} is {value}: a model of type {kind} has no state to set")

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
    if not least <= value < math.inf:
        raise UserError(f"{name} is {value}: it must be at least {least}")
