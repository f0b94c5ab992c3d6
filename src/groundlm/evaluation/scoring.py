"""From rows of tokens to nats of their targets, with logits for a slice of positions at a time.

Works for every transformers causal language model whose head is one matrix (and bias) over its base
model's last hidden state and that sees no token to come; `check_scorable` holds a model against
that.

B rows, T positions, N targets, E width that the head reads, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from groundlm.errors import UserError
from groundlm.model.modeling import GPNForCausalLM

SLICE_LOGITS = 1 << 22
"""Logits held at a time while scoring: 16 MiB in float32."""
CHECKED_TOKENS, LARGE_LOGIT = 8, 100.0
HEAD_TOLERANCE_NATS = 1e-2
LOOKAHEAD_TOLERANCE, LOOKAHEAD_TOLERANCE_16_BIT = 1e-3, 0.1
"""How far a token behind may move what the head reads, as a part of its largest value: far more
than rounding does."""


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether all that the model knows of the past is a state of constant size."""
    layers = getattr(model.config, "layer_types", None) or []
    # transformers' own Qwen3-Next cannot go on from a state without an attention layer.
    carries = model.config.model_type != "qwen3_next"
    return model._is_stateful and carries and "full_attention" not in layers


def context_limit(model: PreTrainedModel) -> int | None:
    """Most tokens that the model can read at once; None for a recurrent model, which has no such
    limit, and for one that names none."""
    if is_recurrent(model):
        return None
    limits = (getattr(model.config, n, None) for n in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in limits if limit), None)


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Number of token ids that the model knows."""
    return model.get_input_embeddings().weight.shape[0]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model in eval mode, and afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def read(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    cache: Any = None,
    keep_cache: bool = False,
    resets_BT: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """What the head reads, [B, T, E], and with `keep_cache` the state to go on from, else None.

    Rows may be padded on the right: no model looks ahead, so what stands behind a position does not
    change it. `resets_BT` (bool, GPN only) starts afresh before these tokens.
    """
    arguments: dict[str, Any] = {} if cache is None else {"cache": cache}
    if resets_BT is not None:
        arguments["resets"] = resets_BT
    out = model.base_model(input_ids=input_ids_BT, use_cache=keep_cache, **arguments)
    hidden = out.last_hidden_state
    if isinstance(model, GPNForCausalLM):
        hidden = model.model.decoder_hidden(hidden)
    return hidden, out.cache if keep_cache else None


def logit_slices(
    model: PreTrainedModel, hidden_NE: Tensor, targets_N: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, W] and targets [n] of consecutive slices of the rows; the logits in float32, or
    float64 for a float64 model."""
    head = model.get_output_embeddings()
    weight = head.weight
    bias = head.bias if isinstance(head, nn.Linear) else None
    rows = max(1, SLICE_LOGITS // weight.shape[0])
    for rows_NE, targets in zip(hidden_NE.split(rows), targets_N.split(rows), strict=True):
        logits = F.linear(rows_NE.to(weight.dtype), weight, bias)
        yield logits.to(torch.promote_types(logits.dtype, torch.float32)), targets


def target_nats(model: PreTrainedModel, hidden_NE: Tensor, targets_N: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, [N], float32 or float64 as the logits."""
    slices = logit_slices(model, hidden_NE, targets_N)
    return torch.cat([F.cross_entropy(x, y, reduction="none") for x, y in slices])


def target_nats_and_tops(
    model: PreTrainedModel, hidden_NE: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """`target_nats`, and whether each target is the most likely token, bool [N]."""
    pairs = [
        (F.cross_entropy(x, y, reduction="none"), x.argmax(-1) == y)
        for x, y in logit_slices(model, hidden_NE, targets_N)
    ]
    nats, is_top = zip(*pairs, strict=True)
    return torch.cat(nats), torch.cat(is_top)


@torch.inference_mode()
def token_nats(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    targets_BT: Tensor,
    resets_BT: Tensor | None = None,
) -> Tensor:
    """Negative log-likelihood of each target in nats, [B, T], float32 or float64.

    `resets_BT`: see `read`.
    """
    hidden_BTE, _ = read(model, input_ids_BT, resets_BT=resets_BT)
    nats_N = target_nats(model, hidden_BTE.flatten(0, 1), targets_BT.flatten())
    return nats_N.view(targets_BT.shape)


def _check_nothing_after_head(model: PreTrainedModel, inputs_1T: Tensor) -> None:
    """Let the head give large values, such as trained models do, and see them come out."""
    head = model.get_output_embeddings()
    given: list[Tensor] = []
    if head is model.get_input_embeddings():  # a GPN's head is its embedding, not called as a head
        return

    def answer(_: Any, __: Any, logits: Tensor) -> Tensor:
        large_W = torch.linspace(-LARGE_LOGIT, LARGE_LOGIT, logits.shape[-1], dtype=torch.float64)
        given.append(large_W.to(logits).expand_as(logits))
        return given[-1]

    hook = head.register_forward_hook(answer)
    try:
        with evaluating(model):
            logits = model(input_ids=inputs_1T, use_cache=False).logits
    finally:
        hook.remove()
    if given and not torch.equal(logits.to(given[-1]), given[-1]):
        raise UserError(
            f"models of type {model.config.model_type} change their logits after the head: they "
            "cannot be scored here"
        )


@torch.inference_mode()
def check_scorable(model: PreTrainedModel) -> None:
    """Raise `UserError` for a model that cannot be scored as it is done here.

    That is one that sees tokens to come, and one whose own logits are not its head's product, as
    where it scales or caps them.
    """
    kind, rows = model.config.model_type, vocabulary_rows(model)
    tokens = max(2, min(CHECKED_TOKENS, context_limit(model) or CHECKED_TOKENS))
    ids_1T = torch.arange(tokens + 1, device=model.device)[None] % rows
    inputs_1T, targets_1T = ids_1T[:, :-1], ids_1T[:, 1:]
    with evaluating(model):
        own = model(input_ids=inputs_1T, use_cache=False).logits[0].double()
        nats_T = token_nats(model, inputs_1T, targets_1T)[0].double()
        before_1TE = read(model, inputs_1T[:, :-1])[0].double()
        after_1TE = read(model, inputs_1T)[0][:, :-1].double()
    wide = model.dtype.itemsize >= 4
    moved = (after_1TE - before_1TE).abs().max() / before_1TE.abs().max()
    if bool(moved > (LOOKAHEAD_TOLERANCE if wide else LOOKAHEAD_TOLERANCE_16_BIT)):
        raise UserError(
            f"models of type {kind} read a token in the light of those after it (what the head "
            f"reads moves by {float(moved):.1%}): they do not predict text and cannot be scored"
        )
    _check_nothing_after_head(model, inputs_1T)
    own_nats_T = F.cross_entropy(own, targets_1T[0], reduction="none")
    apart = (nats_T - own_nats_T).abs().max()
    if bool(apart > HEAD_TOLERANCE_NATS * own_nats_T.abs().max().clamp_min(1)):
        raise UserError(
            f"models of type {kind} change their logits after the head "
            f"({float(apart):.3f} nats apart): they cannot be scored here"
        )
