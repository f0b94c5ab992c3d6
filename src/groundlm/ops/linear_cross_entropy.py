"""Cross-entropy of tied logits without ever holding them for more than a slice of positions."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from groundlm.errors import UserError
from groundlm.model.products import product

IGNORE_INDEX = -100
SLICE_LOGITS = 1 << 23
"""Most logits held at a time: 32 MiB in float32."""
SLICE_ROWS = 512
"""Most positions at a time: with small vocabularies the logits then stay in the cache."""


def linear_cross_entropy(hidden_NE: Tensor, weight_WE: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over targets of `-log softmax(hidden @ weight.T)[target]`, in nats.

    Args:
        hidden_NE: decoder vectors [N, E]; the loss accumulates in their dtype (float32 or float64).
        weight_WE: embedding [W, E]; the product runs in its dtype, or in autocast's.
        targets_N: int64 [N]; `-100` is not scored.

    Returns:
        A scalar in hidden's dtype; 0 when nothing is scored. The gradient of both inputs is formed
        slice by slice on the way forward, so at most `SLICE_LOGITS` logits exist at once.

    Raises:
        UserError: a target that is neither in the vocabulary nor -100.
    """
    kept = (targets_N != IGNORE_INDEX).nonzero().squeeze(1)
    if len(kept) < len(targets_N):
        hidden_NE, targets_N = hidden_NE[kept], targets_N[kept]
    if len(kept):
        low, high = (int(x) for x in torch.aminmax(targets_N))
        size = weight_WE.shape[0]
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise UserError(f"label {bad} is outside the vocabulary of {size}")
    return _LinearCrossEntropy.apply(hidden_NE, weight_WE, targets_N)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NE: Tensor, weight_WE: Tensor, targets_N: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        device = hidden_NE.device.type
        matrix = (
            weight_WE.to(torch.get_autocast_dtype(device))
            if torch.is_autocast_enabled(device)
            else weight_WE
        )
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden_NE) if need_hidden else None
        grad_weight = torch.zeros_like(weight_WE, dtype=hidden_NE.dtype) if need_weight else None
        loss = hidden_NE.new_zeros(())
        rows = max(1, min(SLICE_ROWS, SLICE_LOGITS // weight_WE.shape[0]))
        for start in range(0, len(hidden_NE), rows):
            part = slice(start, start + rows)
            x, y = hidden_NE[part].to(matrix.dtype), targets_N[part, None]
            logits = product(x, matrix.T).to(hidden_NE.dtype)
            # In place from here on: logits, then exp(logits - peak), then the slope of the loss.
            peak, scored = logits.amax(-1, keepdim=True), logits.gather(1, y)
            total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
            loss += (peak + total.log() - scored).sum()
            if not (need_hidden or need_weight):
                continue
            slope = logits.div_(total)
            slope.scatter_add_(1, y, torch.full_like(y, -1, dtype=slope.dtype))
            slope = slope.to(matrix.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = product(slope, matrix)
            if grad_weight is not None:
                grad_weight += product(slope.T, x)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight_WE.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor):  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return (
            None if grad_hidden is None else grad_hidden * grad_loss,
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),  # type: ignore[attr-defined]
            None,
        )


def shift_targets(labels_BT: Tensor) -> Tensor:
    """Labels aligned with inputs [B, T] -> next-token targets [B, T], the last one ignored."""
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORE_INDEX)
