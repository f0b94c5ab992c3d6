"""Optimizers, their parameter groups, the schedule, and the average of the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from groundlm.errors import UserError
from groundlm.training.config import OptimizerConfig

ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)
FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up_proj|(^|\.)in_proj", re.IGNORECASE)
"""Names of projections (keys, values, gates ..) that transformers' models keep in one tensor."""


class Optimizers:
    """What updates a model: AdamW, or Muon on the matrices and AdamW on all else.

    Tensors of two or more dimensions decay, norms, biases and decay rates do not; every trainable
    tensor is in exactly one group, a tied one once. Muon takes each logical matrix by itself: the
    two halves of a SwiGLU `up` matrix are two. Its update is scaled to AdamW's root mean square,
    so that one learning rate serves both. Embeddings are AdamW's.

    Raises `UserError` for Muon on a model of which one tensor holds several matrices otherwise.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        names = {n: p for n, p in model.named_parameters() if p.requires_grad}
        heads = model.get_output_embeddings()  # type: ignore[operator]
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        tables |= set() if heads is None else {id(heads.weight)}
        muon = config.name == "muon"
        self.matrices = {
            n: p for n, p in names.items() if muon and p.dim() == 2 and id(p) not in tables
        }
        refuse_fused(self.matrices)
        others = {n: p for n, p in names.items() if n not in self.matrices}
        self.parameters = list(names.values())
        self._named: dict[str, nn.Parameter] = {}
        self._parts: dict[str, tuple[nn.Parameter, slice]] = {}
        self._keys: dict[str, tuple[str, ...]] = {}
        self._optimizers: list[Optimizer] = [self._adamw(others)]
        if self.matrices:
            self._optimizers.append(self._muon())

    def _adamw(self, parameters: dict[str, nn.Parameter]) -> Optimizer:
        self._register(parameters, ADAMW_STATE)
        c = self.config
        groups = [
            {"params": [p for p in parameters.values() if p.dim() >= 2],
             "weight_decay": c.weight_decay},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]  # fmt: skip
        return AdamW(
            [g for g in groups if g["params"]],
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
            eps=c.eps,
            fused=True,
        )

    def _muon(self) -> Optimizer:
        # Parts share the storage of the parameter they are rows of, so a step on them is one on it.
        self._parts = {
            f"{name}[{i}]": (parameter, rows)
            for name, parameter in self.matrices.items()
            for i, rows in enumerate(logical_rows(name, parameter))
        }
        parts = {k: nn.Parameter(p.detach()[rows]) for k, (p, rows) in self._parts.items()}
        self._register(parts, MUON_STATE)
        c = self.config
        return Muon(
            parts.values(),
            lr=c.learning_rate,
            weight_decay=c.weight_decay,
            momentum=c.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def _register(self, parameters: dict[str, nn.Parameter], keys: tuple[str, ...]) -> None:
        self._named |= parameters
        self._keys |= dict.fromkeys(parameters, keys)

    @property
    def groups(self) -> list[dict[str, object]]:
        """Parameter groups of all optimizers."""
        return [group for o in self._optimizers for group in o.param_groups]

    def step(self, rate: float) -> float:
        """Clip, step with this learning rate, clear the gradients.

        Returns the global gradient norm before clipping. When it is not finite, nothing is stepped.
        """
        clip = self.config.clip_norm
        bound = clip if clip > 0 else math.inf
        norm = float(nn.utils.clip_grad_norm_(self.parameters, bound))
        if math.isfinite(norm):
            for key, (parameter, rows) in self._parts.items():
                self._named[key].grad = None if parameter.grad is None else parameter.grad[rows]
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in [*self.parameters, *self._named.values()]:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All moments by `parameter.key`, on the CPU; empty before the first step."""
        state = self._state()
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self._named.items()
            for key, value in state.get(parameter, {}).items()
        }

    def load_tensors(self, tensors: dict[str, Tensor], source: str) -> None:
        """Put moments back; `UserError` naming source and tensor if one is missing or misshapen."""
        for name, parameter in self._named.items():
            loaded = {}
            if not any(f"{name}.{key}" in tensors for key in self._keys[name]):
                continue  # saved before its first step
            for key in self._keys[name]:
                tensor = tensors.get(f"{name}.{key}")
                want = torch.Size([]) if key == "step" else parameter.shape
                if tensor is None or tensor.shape != want:
                    have = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                    raise UserError(f"{source}: {name}.{key} is {have}, expected {tuple(want)}")
                loaded[key] = tensor.to(parameter.device, copy=True)
            owner = self._optimizers[-1 if self._keys[name] == MUON_STATE else 0]
            owner.state[parameter] = loaded

    def _state(self) -> dict[Tensor, dict[str, Tensor]]:
        return {p: s for o in self._optimizers for p, s in o.state.items()}


def refuse_fused(parameters: dict[str, nn.Parameter]) -> None:
    """Raise `UserError` naming a tensor that holds several matrices, which Muon takes for one."""
    if fused := next(filter(FUSED.search, parameters), None):
        raise UserError(
            f"optimizer.name is muon: {fused} holds several matrices in one tensor, which Muon "
            "would take for one"
        )


def logical_rows(name: str, parameter: nn.Parameter) -> list[slice]:
    """Row ranges of the logical matrices that one stored matrix holds."""
    rows = parameter.shape[0]
    if name.endswith("ffn.up.weight"):  # the swish half above the linear half
        return [slice(0, rows // 2), slice(rows // 2, rows)]
    return [slice(0, rows)]


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `steps`.

    Rises linearly to the peak over the warm-up (its last step has the peak). Then `cosine` falls on
    half a cosine to `final_fraction` of it, reached at the last step; `linear_to_zero` falls on a
    line that would reach zero one step after the last. A warm-up as long as the run never falls.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    past = step - config.warmup_steps
    if config.schedule == "linear_to_zero":
        return config.learning_rate * (1 - past / max(1, steps - config.warmup_steps))
    span = steps - 1 - config.warmup_steps
    height = 0.5 * (1 + math.cos(math.pi * (past / span if span > 0 else 1.0)))
    floor = config.final_fraction
    return config.learning_rate * (floor + (1 - floor) * height)


class WeightAverage:
    """Exponential moving average of a model's weights, float32: `a <- d a + (1 - d) w`."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = dict(model.named_parameters())
        self.average = {n: p.detach().float().clone() for n, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        own, theirs = list(self.average.values()), list(self._weights.values())
        torch._foreach_lerp_(own, [p.float() for p in theirs], 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the average for weights."""
        kept = {n: p.detach().clone() for n, p in self._weights.items()}
        self._set(self.average)
        try:
            yield
        finally:
            self._set(kept)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._weights.items():
            parameter.copy_(values[name])
