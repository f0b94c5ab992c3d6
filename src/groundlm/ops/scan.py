"""The public scan over a whole window, and the choice of the backend that walks it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from groundlm.errors import UserError
from groundlm.model.cell import Carry, CellParams, Tap
from groundlm.model.state import GPNState
from groundlm.ops import stages
from groundlm.ops.fused import fused_scan, unsupported
from groundlm.ops.reference import reference_scan

logger = logging.getLogger(__name__)

Scan = Callable[
    [Tensor, CellParams, Carry, Tensor | None, Tensor | None, bool],
    tuple[Tensor, Carry],
]

BACKENDS: dict[str, Scan] = {"reference": reference_scan, "fused": fused_scan}
"""Every way to walk the recurrence, by name; all compute the same numbers."""

SHORT_WINDOW_TOKENS = 16
"""Shorter windows, single steps above all, walk the reference cell: packing would not pay."""

WEIGHTS_PER_TOKEN = 1 << 17
"""Weights whose folding costs what the fused walk saves in a token of a single row, which needs no
packing: measured break-even 16 tokens with 4 million weights, 128 with 15 million."""

_logged: set[str] = set()


def resolve_backend(name: str) -> str:
    """The backend that `name` (`auto` or one of `BACKENDS`) stands for; logged once.

    Raises `UserError` for an unknown name.
    """
    if name != "auto" and name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise UserError(f"unknown scan backend {name!r}: choose one of {known}")
    chosen = "fused" if name == "auto" else name
    _log_once(f"scan backend: {chosen}")
    return chosen


def backend_for(name: str, token_BTD: Tensor, params: CellParams, carry: Carry) -> str:
    """The backend that walks this window: `resolve_backend`, or `reference` where fused cannot.

    `fused` gives way for windows too short for what it does beforehand, and for tensors it does not
    support; the latter is logged once, with the reason.
    """
    chosen = resolve_backend(name)
    if chosen != "fused":
        return chosen
    if token_BTD.shape[1] < _shortest(token_BTD, params):
        return "reference"
    reason = unsupported(token_BTD, params, carry)
    if reason is None:
        return "fused"
    _log_once(f"scan backend: reference instead of fused: {reason}")
    return "reference"


def _shortest(token_BTD: Tensor, params: CellParams) -> int:
    """Tokens from which folding and packing the weights pays."""
    if torch.is_grad_enabled() or len(token_BTD) > 1 or not token_BTD.is_cpu:
        return SHORT_WINDOW_TOKENS
    weights = sum(weight.numel() for weight in stages.flatten(params).values())
    return max(SHORT_WINDOW_TOKENS, weights // WEIGHTS_PER_TOKEN)


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)


def grounded_scan(
    token_BTD: Tensor,
    params: CellParams,
    state: GPNState,
    resets_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
    backend: str = "auto",
    recompute: bool = False,
    tap: Tap | None = None,
) -> tuple[Tensor, GPNState]:
    """Walk a window of T >= 1 tokens through the recurrence.

    Args:
        token_BTD: token contributions e_t [B, T, D], float32 (or float64), see
            `cell.token_contribution`.
        params: parameters of the cell.
        state: state before the first token.
        resets_BT: bool [B, T]; True makes state and memory zero before that token.
        mask_BT: bool [B, T]; False leaves the state as it was (padding). A reset still applies.
        backend: `auto` or a name of `BACKENDS`.
        recompute: keep the state every sqrt(T) tokens or so for the backward, which walks each
            segment between them again: less memory, more time, the same numbers.
        tap: is shown every value of every step and may replace it (`cell.Tap`); the window then
            takes the `reference` backend whatever the other argument says.

    Returns:
        The predicted states s^p_t [B, T, D] (at a masked position: the state carried over it), and
        the state after the last token. Both are differentiable with respect to the token
        contributions, every parameter and the start state.

    Raises:
        UserError: shapes or batch sizes that do not fit, no token at all, an unknown backend.
    """
    batch, time, width = token_BTD.shape
    if time == 0:
        raise UserError("the window is empty: a scan needs at least 1 token")
    if (state.batch_size, state.predicted_BD.shape[1]) != (batch, width):
        have = f"{state.batch_size} rows of width {state.predicted_BD.shape[1]}"
        raise UserError(f"the state has {have}, the tokens have {batch} rows of width {width}")
    if (state.memory_BHKV is None) != (params.memory is None):
        raise UserError("state and model differ in memory: one has it, the other does not")
    for name, flags in (("resets", resets_BT), ("mask", mask_BT)):
        if flags is not None and flags.shape != (batch, time):
            raise UserError(f"{name} has shape {tuple(flags.shape)}, expected {(batch, time)}")
    carry = (state.predicted_BD, state.grounded_BD, state.memory_BHKV)
    scan: Scan = (
        partial(reference_scan, tap=tap)
        if tap is not None
        else BACKENDS[backend_for(backend, token_BTD, params, carry)]
    )
    predicted_BTD, (predicted, grounded, memory) = scan(
        token_BTD, params, carry, resets_BT, mask_BT, recompute
    )
    final = replace(
        state,
        predicted_BD=predicted,
        grounded_BD=grounded,
        memory_BHKV=memory,
        tokens_seen=_tokens_seen(state.tokens_seen, time, resets_BT, mask_BT),
        positions_seen=state.positions_seen + time,
    )
    return predicted_BTD, final


def _tokens_seen(
    before_B: Tensor, time: int, resets_BT: Tensor | None, mask_BT: Tensor | None
) -> Tensor:
    """Real tokens read since the start or the last reset, int64 [B]."""
    real_BT = (
        torch.ones(len(before_B), time, dtype=torch.int64, device=before_B.device)
        if mask_BT is None
        else mask_BT.long()
    )
    if resets_BT is None:
        return before_B + real_BT.sum(1)
    resets_later_BT = resets_BT.long().flip(1).cumsum(1).flip(1) - resets_BT.long()
    since_B = (real_BT * (resets_later_BT == 0)).sum(1)
    return torch.where(resets_BT.any(1), 0, before_B) + since_B
