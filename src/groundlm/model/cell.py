"""The paper's four operations (arXiv 2605.10643): ground, write, predict, decode.

This is the only place where the recurrence is written out. The reference scan, generation and the
analyses call these functions; the fused scan is a second formulation that the tests hold to them.

Shape suffixes: B batch, T time, D state, E embedding, F ffn, H heads, K key, V value, W vocabulary,
X = H*K, Y = H*V. A leading `...` stands for any batch shape.

Precision: matrices multiply in their own dtype (or in autocast's); norms, biases, gates, decay,
state and memory stay in the dtype of the state, which is float32 (float64 for float64 weights).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from groundlm.model.products import product
from groundlm.model.row_product import applies, row_product

L2_EPS = 1e-12
LARGE_WEIGHT = 1 << 20
"""Elements from which a matrix's product costs more than the choice of its library."""

Carry = tuple[Tensor, Tensor, Tensor | None]
"""What one token hands to the next: predicted [B, D], grounded [B, D], memory [B, H, K, V]."""

Tap = Callable[[str, Tensor], Tensor]
"""Is shown a value of a step by its place and gives back what the step goes on with, as a rule the
same. Places, in order:

- `token` (e_t), `ground.gate` and `grounded` (s^g), all [B, D];
- with a memory `write.key` [B, H, K], `write.value` [B, H, V], `write.beta` and `write.log_decay`
  [B, H], `memory` (after the write) [B, H, K, V];
- for layer i = 0, 1, ... `predict.i.gate`, `predict.i.ffn`, `predict.i.rest` (the retained state
  plus the FFN) [B, D], and with a memory `predict.i.query` [B, H, K], `predict.i.answer` (M^T q)
  [B, H, V], `predict.i.read_gate` (swish(W_rg rms(y))) and `predict.i.gated` (read gate *
  rms(answer), before W_o) [B, Y], `predict.i.read` [B, D];
- `predicted` (s^p) [B, D].
"""


def untouched(place: str, value: Tensor) -> Tensor:
    """The tap that leaves every value as it is."""
    return value


class GroundParams(NamedTuple):
    """Parameters of the grounding gate."""

    gate_norm_D: Tensor
    gate_DD: Tensor
    gate_bias_D: Tensor


class MemoryParams(NamedTuple):
    """Parameters of the memory write, shared by all predict layers."""

    write_norm_D: Tensor
    key_XD: Tensor
    key_bias_X: Tensor
    value_YD: Tensor
    beta_HD: Tensor
    decay_HD: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor


class ReadParams(NamedTuple):
    """Parameters of one layer's read of the memory."""

    norm_D: Tensor
    query_XD: Tensor
    query_bias_X: Tensor
    gate_YD: Tensor
    out_norm_Y: Tensor
    out_DY: Tensor


class PredictParams(NamedTuple):
    """Parameters of one predict layer; `ffn_up` holds the swish half above the linear half."""

    ffn_norm_D: Tensor
    ffn_up_2FD: Tensor
    ffn_down_DF: Tensor
    gate_norm_D: Tensor
    gate_DD: Tensor
    gate_bias_D: Tensor
    read: ReadParams | None


class CellParams(NamedTuple):
    """Everything the recurrence needs besides the token side and the decoder."""

    ground: GroundParams
    memory: MemoryParams | None
    predict: tuple[PredictParams, ...]
    norm_eps: float


class WriteVectors(NamedTuple):
    """What one token writes: unit key, value, strength in (0, 1), log-decay <= 0."""

    key_BHK: Tensor
    value_BHV: Tensor
    beta_BH: Tensor
    log_decay_BH: Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T` in the weight's (or autocast's) dtype, back in x's dtype; bias added there."""
    # A `.to` that changes nothing still costs a microsecond, and a step has dozens of them.
    dtype = x.dtype
    if applies(x, weight):
        y = row_product(x, weight)
    elif weight.dtype is torch.bfloat16 and x.numel() == weight.shape[1]:
        # One row: torch's matrix-vector kernel is up to twice as fast as its matrix kernel.
        y = torch.mv(weight, x.reshape(-1).to(torch.bfloat16)).view(*x.shape[:-1], -1)
    elif (
        weight.numel() >= LARGE_WEIGHT
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
    ):
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if dtype is weight.dtype else rows.to(weight.dtype)
        y = product(rows, weight.T).reshape(*x.shape[:-1], -1)
    else:
        y = F.linear(x if dtype is weight.dtype else x.to(weight.dtype), weight)
    if y.dtype is not dtype:
        y = y.to(dtype)
    if bias is None:
        return y
    return y + (bias if bias.dtype is dtype else bias.to(dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    weight = weight if weight.dtype is x.dtype else weight.to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def l2_norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-12)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def per_head(x: Tensor, heads: int) -> Tensor:
    """[..., H * K] -> [..., H, K]."""
    return x.view(*x.shape[:-1], heads, -1)


def token_contribution(embedded: Tensor, norm_E: Tensor, proj_DE: Tensor, eps: float) -> Tensor:
    """`e_t = W_token rms(embedding[x_t])` of embeddings [..., E]: [..., D] in state dtype."""
    dtype = torch.promote_types(embedded.dtype, torch.float32)
    return linear(rms_norm(embedded.to(dtype), norm_E, eps), proj_DE)


def retain(
    x: Tensor,
    norm_D: Tensor,
    gate_DD: Tensor,
    bias_D: Tensor,
    eps: float,
    tap: Tap = untouched,
    place: str = "gate",
) -> Tensor:
    """`sigmoid(W rms(x) + b) * x`: the gate that both grounding and prediction put on the state."""
    gate = torch.sigmoid(linear(rms_norm(x, norm_D, eps), gate_DD, bias_D))
    return tap(place, gate) * x


def ground(
    token_BD: Tensor, predicted_BD: Tensor, p: GroundParams, eps: float, tap: Tap = untouched
) -> Tensor:
    """Fuse the observed token into the carried prediction: s^g_t from e_t and s^p_{t-1}."""
    gate = (p.gate_norm_D, p.gate_DD, p.gate_bias_D)
    return retain(predicted_BD, *gate, eps, tap, "ground.gate") + token_BD


def write_vectors(
    grounded_prev_BD: Tensor,
    grounded_BD: Tensor,
    p: MemoryParams,
    eps: float,
    tap: Tap = untouched,
) -> WriteVectors:
    """Key from the previous grounded state; value, strength and decay from the current one."""
    heads = p.A_log_H.shape[0]
    here = rms_norm(grounded_BD, p.write_norm_D, eps)
    key = linear(rms_norm(grounded_prev_BD, p.write_norm_D, eps), p.key_XD, p.key_bias_X)
    rate = F.softplus(linear(here, p.decay_HD, p.dt_bias_H))
    return WriteVectors(
        key_BHK=tap("write.key", l2_norm(per_head(torch.relu(key), heads))),
        value_BHV=tap("write.value", per_head(linear(here, p.value_YD), heads)),
        beta_BH=tap("write.beta", torch.sigmoid(linear(here, p.beta_HD))),
        log_decay_BH=tap("write.log_decay", -p.A_log_H.to(rate.dtype).exp() * rate),
    )


def write(memory_BHKV: Tensor, w: WriteVectors) -> Tensor:
    """Gated delta rule: `M_t = exp(gamma) M + beta k (v - M^T k)^T`.

    The correction reads the undecayed memory; Gated DeltaNet decays first.
    """
    correction_BHV = w.value_BHV - recall(memory_BHKV, w.key_BHK)
    decayed_BHKV = w.log_decay_BH.exp().unsqueeze(-1).unsqueeze(-1) * memory_BHKV
    strength_BHV = w.beta_BH.unsqueeze(-1) * correction_BHV
    return torch.addcmul(decayed_BHKV, w.key_BHK.unsqueeze(-1), strength_BHV.unsqueeze(-2))


def recall(memory_BHKV: Tensor, query_BHK: Tensor) -> Tensor:
    """`M^T q` per head, in the memory's dtype even under autocast: [B, H, V]."""
    device = memory_BHKV.device.type
    if not torch.is_autocast_enabled(device):
        return torch.matmul(query_BHK.unsqueeze(-2), memory_BHKV).squeeze(-2)
    with torch.autocast(device, enabled=False):
        return torch.matmul(query_BHK.unsqueeze(-2), memory_BHKV).squeeze(-2)


def read(
    y_BD: Tensor,
    memory_BHKV: Tensor,
    p: ReadParams,
    eps: float,
    tap: Tap = untouched,
    place: str = "",
) -> Tensor:
    """Query the memory and bring the answer back to the state: `W_o (swish(gate) * rms(M^T q))`."""
    heads = memory_BHKV.shape[-3]
    here = rms_norm(y_BD, p.norm_D, eps)
    query = l2_norm(per_head(torch.relu(linear(here, p.query_XD, p.query_bias_X)), heads))
    answer_BHV = tap(place + "answer", recall(memory_BHKV, tap(place + "query", query)))
    gate_BY = tap(place + "read_gate", F.silu(linear(here, p.gate_YD)))
    gated_BY = gate_BY * rms_norm(answer_BHV.flatten(-2), p.out_norm_Y, eps)
    return tap(place + "read", linear(tap(place + "gated", gated_BY), p.out_DY))


def ffn(y_BD: Tensor, p: PredictParams, eps: float) -> Tensor:
    """`W_down (swish(a) * b)` with `[a; b] = W_up rms(y)`."""
    a, b = linear(rms_norm(y_BD, p.ffn_norm_D, eps), p.ffn_up_2FD).chunk(2, -1)
    return linear(F.silu(a) * b, p.ffn_down_DF)


def predict(
    y_BD: Tensor,
    memory_BHKV: Tensor | None,
    p: PredictParams,
    eps: float,
    tap: Tap = untouched,
    place: str = "",
) -> Tensor:
    """One predict layer: gated carry of y, plus FFN, plus the read of the memory."""
    gate = (p.gate_norm_D, p.gate_DD, p.gate_bias_D)
    retained_BD = retain(y_BD, *gate, eps, tap, place + "gate")
    out = tap(place + "rest", retained_BD + tap(place + "ffn", ffn(y_BD, p, eps)))
    if p.read is not None and memory_BHKV is not None:
        out = out + read(y_BD, memory_BHKV, p.read, eps, tap, place)
    return out


def decode(
    predicted: Tensor,
    norm_D: Tensor,
    proj_ED: Tensor,
    bias_E: Tensor | None,
    embedding_WE: Tensor,
    eps: float,
) -> Tensor:
    """Logits `embedding (W_dec rms(s^p) [+ b])` for states [..., D]: [..., W] in state dtype."""
    return linear(decoder_hidden(predicted, norm_D, proj_ED, bias_E, eps), embedding_WE)


def decoder_hidden(
    predicted: Tensor, norm_D: Tensor, proj_ED: Tensor, bias_E: Tensor | None, eps: float
) -> Tensor:
    """`W_dec rms(s^p) [+ b]`, the vector that is compared with every embedding: [..., E]."""
    return linear(rms_norm(predicted, norm_D, eps), proj_ED, bias_E)


def step(
    token_BD: Tensor,
    predicted_BD: Tensor,
    grounded_BD: Tensor,
    memory_BHKV: Tensor | None,
    params: CellParams,
    tap: Tap = untouched,
) -> Carry:
    """One token: carried (s^p, s^g, M) and its contribution e_t [B, D] to the next carry."""
    eps = params.norm_eps
    token_BD = tap("token", token_BD)
    grounded_next_BD = tap("grounded", ground(token_BD, predicted_BD, params.ground, eps, tap))
    if params.memory is not None and memory_BHKV is not None:
        vectors = write_vectors(grounded_BD, grounded_next_BD, params.memory, eps, tap)
        memory_BHKV = tap("memory", write(memory_BHKV, vectors))
    y_BD = grounded_next_BD
    for i, layer in enumerate(params.predict):
        y_BD = predict(y_BD, memory_BHKV, layer, eps, tap, f"predict.{i}.")
    return tap("predicted", y_BD), grounded_next_BD, memory_BHKV
