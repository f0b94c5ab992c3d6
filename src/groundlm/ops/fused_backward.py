"""The fused scan in reverse: derived by hand, three input-gradient products per token.

The activations of a chunk become local derivatives at once (`LayerSlopes`); the walk then only
multiplies them by the gradients that arrive, in place, so that after it the tape holds the gradient
of every product's result, time-major. The weight gradients are one product each over all rows.

With `n = x / rms(x)` and dn its gradient, `dx = (dn - n mean(n dn)) / rms(x)`; the same with a sum
for unit vectors `x / |x|`. The log-decay needs no product with the memory: with D_t the gradient of
M_t and `r_t = <D_t, M_t>`, `dgamma_t = r_t - u_t . du_t` and
`r_{t-1} = dgamma_t + (sum of dy . y over the reads of token t-1)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groundlm.ops.fused_forward import LayerTape, Product, Products, Tape, Window
from groundlm.ops.stages import Sizes


@dataclass
class Arriving:
    """Gradients that a token receives from what it hands to the next."""

    predicted_BD: Tensor
    grounded_BD: Tensor | None
    """Only through final state and padding: the usual way is the next token's key."""
    memory_PKV: Tensor | None = None
    key_PK: Tensor | None = None
    recalled_BHV: Tensor | None = None
    decay_BH: Tensor | None = None
    """r_t without the reads of token t."""


class LayerSlopes:
    """Local derivatives of one layer over the tokens `span` of a tape, in the place of its results.

    Lists hold one view per token. `into_*` views are multiplied by arriving gradients in the walk.
    """

    def __init__(self, window: Window, tape: Tape, i: int, span: slice) -> None:
        s, layer = window.sizes, tape.layers[i]
        c, width = layer.columns, s.ffn + s.answer
        into, sigmoids = layer.into_TBN[span], layer.sigmoids_TBN[span]
        active, swished = sigmoids[..., :width], into[..., s.ffn : s.ffn + width]
        swish = swished * active
        slope = torch.addcmul(swish, swish, active, value=-1).add_(active)
        slope[..., : s.ffn] *= into[..., : s.ffn]
        if s.heads:
            answers = _answers(s, tape, i, span) * layer.read_scale_TB1[span]
            slope[..., s.ffn :] *= answers
            self.answers = answers.unbind(0)
            reads = into[..., c["reads"]].unflatten(-1, (s.heads, -1, s.key))
            self.read_slope = ((reads > 0) * layer.unit_scale_TBHR1[span]).unbind(0)
            self.into_reads = reads.unbind(0)
        swished.copy_(slope)
        self.swish, self.into_swished = swish.unbind(0), swished.unbind(0)
        self.into_linear = into[..., : s.ffn].unbind(0)
        gate = sigmoids[..., width : width + s.state]
        carried = layer.normed_TBD[span] / layer.scale_TB1[span]
        torch.mul(torch.addcmul(gate, gate, gate, value=-1), carried, out=into[..., c["gate"]])
        self.gate, self.into_gate = gate.unbind(0), into[..., c["gate"]].unbind(0)
        if s.heads and i == 0:
            self._write(window, layer, into, sigmoids)

    def _write(self, window: Window, layer: LayerTape, into: Tensor, sigmoids: Tensor) -> None:
        s, c = window.sizes, layer.columns
        beta = sigmoids[..., c["beta"].start - s.ffn : c["beta"].stop - s.ffn]
        torch.addcmul(beta, beta, beta, value=-1, out=into[..., c["beta"]])
        decay = sigmoids[..., c["decay"].start - s.ffn :]
        torch.mul(decay, window.decay_rate_H, out=into[..., c["decay"]])
        self.beta, self.into_beta = beta.unbind(0), into[..., c["beta"]].unbind(0)
        self.into_decay = into[..., c["decay"]].unbind(0)
        self.corrections = into[..., c["value"]].unflatten(-1, (s.heads, -1)).unbind(0)


def _answers(s: Sizes, tape: Tape, i: int, span: slice) -> Tensor:
    """Answers to layer i's queries, [T, B, Y]."""
    assert tape.memory is not None
    answers = tape.memory.answers_TPRV[span, :, 0 if i == 0 else i + 1]
    return answers.unflatten(1, (s.batch, s.heads)).flatten(2)


def backward_segment(
    window: Window,
    products: Products,
    tape: Tape,
    arriving: Arriving,
    output_grads: Sequence[Tensor],
    token_grads: Sequence[Tensor],
    first: int,
    key_bias_grad: Tensor | None,
) -> Arriving:
    """Walk the tokens `first ..` on the tape in reverse.

    Args:
        products: the transposed matrices.
        arriving: gradients of the state after the last of these tokens.
        output_grads: gradients of s^p_t as an output, one [B, D] per token.
        token_grads: buffers [B, D] for the gradients of e_t.
        key_bias_grad: [H, K], takes the gradient of keys at document boundaries.

    Returns:
        Gradients of the state before the first of these tokens.
    """
    s, memory, chunk = window.sizes, tape.memory, tape.chunk
    count = len(output_grads)
    for start in reversed(range(0, count, chunk)):
        stop = min(start + chunk, count)
        if memory is not None:
            assert arriving.memory_PKV is not None
            decay_P = memory.open_reverse(start // chunk, stop - start, arriving.memory_PKV)
            arriving.decay_BH = decay_P.view(s.batch, s.heads)
        if window.compiled and window.clean(first + start, stop - start):
            span = range(start, stop)
            tape.native(window).backward(products, arriving, output_grads, token_grads, span)
        else:
            _chunk(
                window,
                products,
                tape,
                arriving,
                output_grads[start:stop],
                token_grads[start:stop],
                start,
                first + start,
                key_bias_grad,
            )
        if memory is not None:
            assert arriving.memory_PKV is not None
            arriving.memory_PKV = memory.close_reverse(stop - start, arriving.memory_PKV)
    return arriving


def _chunk(
    window: Window,
    products: Products,
    tape: Tape,
    arriving: Arriving,
    output_grads: Sequence[Tensor],
    token_grads: Sequence[Tensor],
    start: int,
    first: int,
    key_bias_grad: Tensor | None,
) -> None:
    """The tape's tokens `start ..` of one chunk, which are the window's tokens `first ..`."""
    count = len(output_grads)
    span = slice(start, start + count)
    slopes = [LayerSlopes(window, tape, i, span) for i in range(window.sizes.layers)]
    gates = tape.gate_TBD[span]
    gate_slopes = torch.addcmul(gates, gates, gates, value=-1)
    gate_slopes *= tape.normed_TBD[span] / tape.scale_TB1[span]
    for j in reversed(range(count)):
        _token(
            window,
            products,
            tape,
            slopes,
            gate_slopes[j],
            arriving,
            output_grads[j],
            token_grads[j],
            start + j,
            first + j,
            key_bias_grad,
        )


def _token(
    window: Window,
    products: Products,
    tape: Tape,
    slopes: list[LayerSlopes],
    gate_slope_BD: Tensor,
    arriving: Arriving,
    output_grad_BD: Tensor,
    token_grad_BD: Tensor,
    step: int,
    t: int,
    key_bias_grad: Tensor | None,
) -> None:
    """One token; `arriving` goes from what follows it to what precedes it."""
    kept, reset = window.kept[t], window.resets[t]
    passed_BD = None
    grad = arriving.predicted_BD + output_grad_BD
    if kept is not None:
        passed_BD, grad = grad.masked_fill(kept, 0), grad.masked_fill(~kept, 0)
    for i in reversed(range(window.sizes.layers)):
        grad = _layer(
            window, products.layers[i], tape, slopes[i], i, arriving, grad, step, t, key_bias_grad
        )
    if arriving.grounded_BD is not None:
        grad += arriving.grounded_BD
        arriving.grounded_BD = None
    if kept is not None:
        arriving.grounded_BD = grad.masked_fill(kept, 0)
        if reset is not None:
            arriving.grounded_BD.masked_fill_(reset, 0)
        grad.masked_fill_(~kept, 0)
    token_grad_BD.copy_(grad)
    gate = tape.gate[step]
    direct = grad * gate
    gate_grad = torch.mul(grad, gate_slope_BD, out=gate)
    normed_grad = products.gate(gate_grad)
    _unnormalise(normed_grad, tape.normed[step], tape.scale[step], direct)
    if passed_BD is not None:
        direct += passed_BD
    if reset is not None:
        direct.masked_fill_(reset, 0)
    arriving.predicted_BD = direct


def _unnormalise(grad: Tensor, normed: Tensor, scale: Tensor, onto: Tensor) -> Tensor:
    """`onto += (dn - n mean(n dn)) / rms(x)`; overwrites `grad`, which is dn."""
    mean = (grad * normed).mean(-1, keepdim=True)
    grad.addcmul_(normed, mean, value=-1)
    return onto.addcmul_(grad, scale)


def _layer(
    window: Window,
    products: tuple[Product, Product],
    tape: Tape,
    slopes: LayerSlopes,
    i: int,
    arriving: Arriving,
    grad_BD: Tensor,
    step: int,
    t: int,
    key_bias_grad: Tensor | None,
) -> Tensor:
    """Predict layer i: gradient of its result in, of its input out."""
    s, layer = window.sizes, tape.layers[i]
    j = step % tape.chunk
    inner = products[1](grad_BD)
    gate = slopes.gate[j]
    direct = grad_BD * gate
    gate.copy_(grad_BD)
    slopes.into_gate[j].mul_(grad_BD)
    torch.mul(inner[:, : s.ffn], slopes.swish[j][:, : s.ffn], out=slopes.into_linear[j])
    slopes.into_swished[j].mul_(inner)
    if s.heads:
        read_grad = inner[:, s.ffn :] * slopes.swish[j][:, s.ffn :]
        _read(window, tape, slopes, i, arriving, read_grad, step, t, key_bias_grad)
        if i == 0:
            _write(window, tape, slopes, arriving, step, t)
    normed_grad = products[0](layer.into[step])
    return _unnormalise(normed_grad, layer.normed[step], layer.scale[step], direct)


def _read(
    window: Window,
    tape: Tape,
    slopes: LayerSlopes,
    i: int,
    arriving: Arriving,
    grad_BY: Tensor,
    step: int,
    t: int,
    key_bias_grad: Tensor | None,
) -> None:
    """From the gradient of layer i's normed answer to that of its query (and the next key)."""
    s, memory, j = window.sizes, tape.memory, step % tape.chunk
    assert memory is not None
    answer = slopes.answers[j]
    mean = (grad_BY * answer).mean(-1, keepdim=True)
    grad_BY.addcmul_(answer, mean, value=-1)
    first, count = (0, 2) if i == 0 else (i + 1, 1)
    heads = (s.batch, s.heads)
    into = memory.grad_slots(j, first, count).unflatten(0, heads)
    scale = tape.layers[i].read_scale[step]
    torch.mul(grad_BY.unflatten(1, (s.heads, -1)), scale.unsqueeze(-1), out=into[:, :, 0])
    if i == 0:
        assert arriving.recalled_BHV is not None
        into[:, :, 1] = arriving.recalled_BHV
    grad = memory.reverse_read(j, first, count)
    if i == 0:
        assert arriving.key_PK is not None
        grad[:, 1].add_(arriving.key_PK)
    x = memory.slots(j, first, count)
    grad.addcmul_(x, (grad * x).sum(-1, keepdim=True), value=-1)
    out = torch.mul(grad.unflatten(0, heads), slopes.read_slope[j], out=slopes.into_reads[j])
    reset = window.resets[t + 1] if i == 0 and t + 1 < len(window.resets) else None
    if reset is not None:
        at_reset = reset[:, :, None]
        if key_bias_grad is not None:
            key_bias_grad += out[:, :, 1].masked_fill(~at_reset, 0).sum(0)
        out[:, :, 1].masked_fill_(at_reset, 0)


def _write(
    window: Window, tape: Tape, slopes: LayerSlopes, arriving: Arriving, step: int, t: int
) -> None:
    """Gradients of value, strength and log-decay, and what the previous token gets."""
    s, memory, j = window.sizes, tape.memory, step % tape.chunk
    kept, reset = window.kept[t], window.resets[t]
    assert memory is not None
    assert arriving.decay_BH is not None
    grad = memory.write_grad(j).view(s.batch, s.heads, s.value)
    beta, correction = slopes.beta[j], slopes.corrections[j]
    beta_grad = (grad * correction).sum(-1)
    answer_grads = memory.grad_slots(j, 0, s.all_reads)
    from_reads = (answer_grads * memory.answers[step]).sum((1, 2)).view(s.batch, s.heads)
    decay_grad = from_reads.add_(arriving.decay_BH).addcmul_(beta, beta_grad, value=-1)
    if reset is not None:
        decay_grad.masked_fill_(reset, 0)
    slopes.into_beta[j].mul_(beta_grad)
    tape.log_decay[step].mul_(decay_grad)
    slopes.into_decay[j].mul_(decay_grad if kept is None else decay_grad.masked_fill(~kept, 0))
    value_grad = torch.mul(grad, beta.unsqueeze(-1), out=correction)
    recalled_grad = value_grad.neg()
    if reset is not None:
        recalled_grad.masked_fill_(reset.unsqueeze(-1), 0)
    arriving.recalled_BHV = recalled_grad
    arriving.key_PK = memory.key_grad(j).squeeze(1)
    arriving.decay_BH = decay_grad
