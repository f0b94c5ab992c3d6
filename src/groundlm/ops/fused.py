"""The fused scan: the whole window as one autograd function with a hand-derived backward.

Not the plain loop's graph of small products, but (see docs/performance.md): norms folded into
concatenated matrices that are packed once per window (`stages`, `packed_linear`), a memory that is
read without being rewritten (`lazy_memory`), a forward walk that leaves a tape (`fused_forward`), a
reverse walk with three products per token (`fused_backward`), and weight gradients as one product
over all rows after it. A window whose tape would pass the memory budget is cut into segments: the
forward keeps the states between them, and the backward replays one segment at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groundlm.model.cell import Carry, CellParams
from groundlm.ops import stages
from groundlm.ops.fused_run import Call, Run, ScanSettings

_settings = ScanSettings()


def settings_in_use() -> ScanSettings:
    """The settings of scans that are given none of their own."""
    return _settings


@contextmanager
def use_settings(settings: ScanSettings) -> Iterator[None]:
    """Scans inside the block, from every thread, use these settings."""
    global _settings
    before, _settings = _settings, settings
    try:
        yield
    finally:
        _settings = before


def unsupported(token_BTD: Tensor, params: CellParams, carry: Carry) -> str | None:
    """Why the fused scan cannot walk this window (in words for the log), or None if it can."""
    tensors = [token_BTD, *(x for x in carry if x is not None)]
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return "token contributions and state must be all float32 or all float64"
    named = stages.flatten(params)
    matrices = {x.dtype for name, x in named.items() if stages.is_matrix(name)}
    if len(matrices) > 1:
        return "the matrices differ in dtype"
    if any(x.device != token_BTD.device for x in (*tensors, *named.values())):
        return "the tensors lie on several devices"
    return None


def fused_scan(
    token_BTD: Tensor,
    params: CellParams,
    carry: Carry,
    resets_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
    recompute: bool = False,
    settings: ScanSettings | None = None,
) -> tuple[Tensor, Carry]:
    """Walk the window; see `groundlm.ops.grounded_scan` for the contract.

    Precision: products run in the matrices' dtype (or autocast's), everything else, gradients of
    the weights included, in the dtype of the state. Double backward is refused.
    """
    reason = unsupported(token_BTD, params, carry)
    if reason is not None:
        raise ValueError(f"the fused scan cannot run: {reason}")
    named = stages.flatten(params)
    tensors = [token_BTD, *(x for x in carry if x is not None), *named.values()]
    call = Call(
        sizes=stages.sizes_of(params, carry[0]),
        names=list(named),
        has_memory=carry[2] is not None,
        resets_BT=resets_BT,
        mask_BT=mask_BT,
        recompute=recompute,
        settings=settings or _settings,
        matrix_dtype=_matrix_dtype(token_BTD, params),
        keep=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )
    predicted_BTD, *after = _FusedScan.apply(call, *tensors)
    return predicted_BTD, (after[0], after[1], after[2] if call.has_memory else None)


def _matrix_dtype(token_BTD: Tensor, params: CellParams) -> torch.dtype:
    dtype, device = params.ground.gate_DD.dtype, token_BTD.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


class _FusedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: Call, *tensors: Tensor):  # type: ignore[no-untyped-def]
        with torch.autocast(tensors[0].device.type, enabled=False):
            run = Run(call)
            outputs = run.forward(tensors)
        if call.keep:
            ctx.run, ctx.needs = run, ctx.needs_input_grad[1:]
            ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):  # type: ignore[no-untyped-def]
        tensors = ctx.saved_tensors
        with torch.autocast(tensors[0].device.type, enabled=False):
            return None, *ctx.run.backward(tensors, grads, ctx.needs)
