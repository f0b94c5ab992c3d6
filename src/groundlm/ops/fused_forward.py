"""The fused scan forwards: three products per token, everything else on preallocated buffers.

Per token (one predict layer): the gate `f = sigmoid(W_f n_p + b_f)` and `s^g = f s^p + e`; one
product of `n = s^g / rms(s^g)` with the concatenated matrix of `stages`; the memory, lazily; one
product of `[swish(a) b | swish(c) rms(o)]` back to the state; `s^p = sigmoid(z) s^g + that`.
What the reverse walk needs is left in a `Tape`, time-major; a forward without gradients runs over
one short tape again and again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from groundlm.ops.lazy_memory import LazyMemory
from groundlm.ops.native import NativeTape
from groundlm.ops.stages import Sizes, empty

Product = Callable[[Tensor], Tensor]


@dataclass
class Products:
    """The matrices of a window in one direction: ground gate, then (in, out) of every layer."""

    gate: Product
    layers: Sequence[tuple[Product, Product]]


@dataclass
class Window:
    """What the walk over a window needs besides matrices."""

    sizes: Sizes
    eps_1: Tensor
    decay_rate_H: Tensor
    """-exp(A_log): the log-decay is this times a softplus."""
    key_bias_HK: Tensor
    resets: list[Tensor | None]
    """Per token, None or the rows [B, 1] that start afresh before it."""
    kept: list[Tensor | None]
    """Per token, None or the rows [B, 1] whose state moves on (False: padding)."""
    compiled: bool
    """Let compiled code walk the chunks that it can."""

    def clean(self, first: int, count: int) -> bool:
        """Whether `count` tokens have no padding, and no boundary before, in or right after."""
        tokens = slice(first, first + count)
        resets = self.resets[first : first + count + 1]
        return not any(x is not None for x in (*self.kept[tokens], *resets))


@dataclass
class Walk:
    """The state between two tokens, with the next token's key and what it recalls."""

    predicted_BD: Tensor
    grounded_BD: Tensor
    memory_PKV: Tensor | None = None
    key_PK: Tensor | None = None
    recalled_PV: Tensor | None = None


class LayerTape:
    """Activations of one predict layer over `steps` tokens, time-major."""

    def __init__(self, s: Sizes, layer: int, steps: int) -> None:
        columns = s.columns(layer)
        self.columns = columns
        self.into_TBN = empty(s, steps, s.batch, columns["all"].stop)
        """Results of the first product; the reverse walk puts their gradients in their place."""
        self.into = self.into_TBN.unbind(0)
        self.normed_TBD = empty(s, steps, s.batch, s.state)
        self.normed = self.normed_TBD.unbind(0)
        self.scale_TB1 = empty(s, steps, s.batch, 1)
        self.scale = self.scale_TB1.unbind(0)
        self.inner_TBI = empty(s, steps, s.batch, s.ffn + s.answer)
        self.inner = self.inner_TBI.unbind(0)
        self.sigmoids_TBN = empty(s, steps, s.batch, columns["decay"].stop - s.ffn)
        """Sigmoids of `swish | read_gate | gate | beta | decay`."""
        self.sigmoids = self.sigmoids_TBN.unbind(0)
        self.read_scale_TB1 = empty(s, steps, s.batch, 1)
        self.read_scale = self.read_scale_TB1.unbind(0)
        self.unit_scale_TBHR1 = empty(s, steps, s.batch, s.heads, s.reads(layer), 1)
        self.unit_scale = self.unit_scale_TBHR1.unbind(0)


class Tape:
    """Everything the reverse walk needs of `steps` tokens."""

    def __init__(self, s: Sizes, steps: int, chunk: int) -> None:
        self.steps, self.chunk = steps, chunk
        self.gate_TBD = empty(s, steps, s.batch, s.state)
        self.gate = self.gate_TBD.unbind(0)
        self.normed_TBD = empty(s, steps, s.batch, s.state)
        self.normed = self.normed_TBD.unbind(0)
        self.scale_TB1 = empty(s, steps, s.batch, 1)
        self.scale = self.scale_TB1.unbind(0)
        self.layers = [LayerTape(s, i, steps) for i in range(s.layers)]
        self.memory = LazyMemory(s, steps, chunk) if s.heads else None
        self.log_decay_TBH = empty(s, steps, s.batch, s.heads)
        self.log_decay = self.log_decay_TBH.unbind(0)
        self._native: NativeTape | None = None

    def native(self, window: Window) -> NativeTape:
        """The compiled walks over this tape."""
        if self._native is None:
            self._native = NativeTape(window.sizes, self)
        return self._native.for_window(window.decay_rate_H)


def normalise(x: Tensor, eps_1: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """`x / rms(x)` and `1 / rms(x)` over the last axis, into the given buffers."""
    rms_scale(x, eps_1, scale)
    return torch.mul(x, scale, out=normed)


def rms_scale(x: Tensor, eps_1: Tensor, scale: Tensor) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, into `scale`."""
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=scale)
    torch.addcmul(eps_1, scale, scale, value=1 / x.shape[-1], out=scale)
    return scale.rsqrt_()


def unit(x: Tensor, out: Tensor, scale: Tensor, eps: float) -> None:
    """`l2(relu(x))` over the last axis into `out`, its factor into `scale`; overwrites x."""
    x.relu_()
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=scale)
    scale.square_().add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)


def forward_segment(
    window: Window,
    products: Products,
    tape: Tape,
    walk: Walk,
    tokens: Sequence[Tensor],
    outputs: Sequence[Tensor],
    first: int,
) -> Walk:
    """Walk `len(tokens)` tokens, the window's `first ..`, and leave their activations on the tape.

    Args:
        tokens: e_t, one [B, D] per token.
        outputs: buffers [B, D] for s^p_t.
    """
    memory, chunk, count = tape.memory, tape.chunk, len(tokens)
    if memory is not None:
        assert walk.key_PK is not None
        memory.first_key_PK.copy_(walk.key_PK)
    for start in range(0, count, chunk):
        span = range(start, min(start + chunk, count))
        if memory is not None:
            held = walk.memory_PKV if start == 0 else memory.last(start // chunk - 1, chunk)
            assert held is not None
            memory.open(start // chunk, held)
        if window.compiled and window.clean(first + start, len(span)):
            tape.native(window).forward(products, walk, tokens, outputs, span)
            continue
        for step in span:
            walk = _token(
                window, products, tape, walk, tokens[step], outputs[step], step, first + step
            )
    if memory is not None:
        c, j = memory.place(count - 1)
        walk.memory_PKV = memory.last(c, j + 1)
    return walk


def _token(
    window: Window,
    products: Products,
    tape: Tape,
    walk: Walk,
    token_BD: Tensor,
    out_BD: Tensor,
    step: int,
    t: int,
) -> Walk:
    s, kept, reset = window.sizes, window.kept[t], window.resets[t]
    before_BD = walk.predicted_BD
    if reset is not None:
        before_BD = before_BD.masked_fill(reset, 0)
    normed = normalise(before_BD, window.eps_1, tape.normed[step], tape.scale[step])
    gate = torch.sigmoid(products.gate(normed), out=tape.gate[step])
    y = torch.addcmul(token_BD, gate, before_BD)
    if kept is not None:
        grounded_before = walk.grounded_BD
        if reset is not None:
            grounded_before = grounded_before.masked_fill(reset, 0)
        y = torch.where(kept, y, grounded_before)
    after = Walk(out_BD, y)
    for i in range(s.layers):
        out = out_BD if i == s.layers - 1 else None
        y = _layer(window, products.layers[i], tape, i, walk, after, y, out, step, t)
    if kept is not None:
        out_BD.copy_(torch.where(kept, out_BD, before_BD))
    return after


def _layer(
    window: Window,
    products: tuple[Product, Product],
    tape: Tape,
    i: int,
    before: Walk,
    after: Walk,
    y_BD: Tensor,
    out_BD: Tensor | None,
    step: int,
    t: int,
) -> Tensor:
    """Predict layer i; the first one also writes, and fetches the next token's recall."""
    s, layer = window.sizes, tape.layers[i]
    columns = layer.columns
    normed = normalise(y_BD, window.eps_1, layer.normed[step], layer.scale[step])
    into = layer.into[step]
    into.copy_(products[0](normed))
    width = s.ffn + s.answer
    sigmoids = torch.sigmoid(into[:, s.ffn : columns["decay"].stop], out=layer.sigmoids[step])
    inner = torch.mul(into[:, s.ffn : s.ffn + width], sigmoids[:, :width], out=layer.inner[step])
    inner[:, : s.ffn] *= into[:, : s.ffn]
    if tape.memory is not None:
        if i == 0:
            _write(window, tape, before, into, sigmoids, step, t)
        answer_BY = _read(window, tape, i, after, into, step, t)
        scale = rms_scale(answer_BY, window.eps_1, layer.read_scale[step])
        inner[:, s.ffn :] *= answer_BY * scale
    z = products[1](inner)
    return torch.addcmul(z, sigmoids[:, width : width + s.state], y_BD, out=out_BD)


def _write(
    window: Window, tape: Tape, before: Walk, into: Tensor, sigmoids: Tensor, step: int, t: int
) -> None:
    """Strength, decay and correction of this token's write; the correction w replaces v."""
    s, memory, columns = window.sizes, tape.memory, tape.layers[0].columns
    assert memory is not None
    assert before.key_PK is not None
    assert before.recalled_PV is not None
    log_decay = F.softplus(into[:, columns["decay"]])
    log_decay *= window.decay_rate_H
    beta = sigmoids[:, columns["beta"].start - s.ffn : columns["beta"].stop - s.ffn]
    kept, reset = window.kept[t], window.resets[t]
    if kept is not None:
        log_decay.masked_fill_(~kept, 0)
        beta.masked_fill_(~kept, 0)
    if reset is not None:
        log_decay.masked_fill_(reset, 0)
    tape.log_decay[step].copy_(log_decay)
    decay = log_decay.exp_()
    if reset is not None:
        decay.masked_fill_(reset, 0)
    _, j = memory.place(step)
    write_PV = memory.write(j, before.key_PK, decay.view(-1, 1))
    correction = into[:, columns["value"]].unflatten(1, (s.heads, -1))
    correction -= before.recalled_PV.view(s.batch, s.heads, -1)
    torch.mul(correction, beta.unsqueeze(-1), out=write_PV.unflatten(0, (s.batch, -1)))


def _read(
    window: Window, tape: Tape, i: int, after: Walk, into: Tensor, step: int, t: int
) -> Tensor:
    """The answer to layer i's query, [B, Y]; layer 0 also reads for the next token's write."""
    s, memory, layer = window.sizes, tape.memory, tape.layers[i]
    assert memory is not None
    count = s.reads(i)
    first = 0 if i == 0 else i + 1
    raw = into[:, layer.columns["reads"]].view(s.batch, s.heads, count, s.key)
    reset = window.resets[t + 1] if i == 0 and t + 1 < len(window.resets) else None
    if reset is not None:
        raw[:, :, 1] = torch.where(reset[:, :, None], window.key_bias_HK, raw[:, :, 1])
    _, j = memory.place(step)
    slots = memory.slots(j, first, count)
    out = slots.unflatten(0, (s.batch, s.heads))
    unit(raw, out, layer.unit_scale[step], UNIT_EPS)
    answers = memory.read(step, j, first, count)
    if i == 0:
        after.key_PK = slots[:, 1]
        after.recalled_PV = answers[:, 1]
        if reset is not None:
            after.recalled_PV = _per_head(after.recalled_PV, s).masked_fill(reset[:, :, None], 0)
            after.recalled_PV = after.recalled_PV.flatten(0, 1)
    return answers[:, 0].unflatten(0, (s.batch, s.heads)).flatten(1)


def _per_head(x_PN: Tensor, s: Sizes) -> Tensor:
    return x_PN.unflatten(0, (s.batch, s.heads))


UNIT_EPS = 1e-12
