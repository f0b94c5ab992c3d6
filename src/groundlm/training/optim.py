"""The optimizer of the paper's recipe: parameter groups, schedule, clipping."""

import math

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from groundlm.training.config import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: tensors of two or more dimensions decay, norms, biases and decay rates do not.

    Every trainable tensor is in exactly one group, a tied one once.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW over `parameter_groups`, foreach-fused where the device has it."""
    return AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `steps`.

    Rises linearly to the peak over the warm-up (its last step has the peak), then falls on half a
    cosine to `final_fraction` of it, reached at the last step. A warm-up as long as the run or
    longer never falls.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = steps - 1 - config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / span) if span > 0 else 1.0
    height = 0.5 * (1 + math.cos(math.pi * progress))
    floor = config.final_fraction
    return config.learning_rate * (floor + (1 - floor) * height)


def apply_step(
    optimizer: Optimizer, parameters: list[nn.Parameter], rate: float, clip_norm: float
) -> float:
    """Clip, step with the given learning rate, clear the gradients.

    Returns the global gradient norm before clipping.
    """
    bound = clip_norm if clip_norm > 0 else math.inf
    norm = torch.nn.utils.clip_grad_norm_(parameters, bound)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
