"""One window of the fused scan: its plan, its segments, and the order of the two walks."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groundlm.model.products import product
from groundlm.ops import native, stages
from groundlm.ops.fused_backward import Arriving, backward_segment
from groundlm.ops.fused_forward import (
    UNIT_EPS,
    Products,
    Tape,
    Walk,
    Window,
    forward_segment,
    normalise,
    unit,
)
from groundlm.ops.lazy_memory import chunk_tokens
from groundlm.ops.packed_linear import PackedLinear
from groundlm.ops.reference import segment_tokens
from groundlm.ops.stages import Sizes, empty


@dataclass(frozen=True)
class ScanSettings:
    """How the fused scan uses the machine; no setting changes what it computes."""

    memory_budget_bytes: int = 1 << 30
    """Activations kept for the backward; a longer window is recomputed segment by segment."""
    chunk_tokens: int | None = None
    """Tokens between two writes of the memory; None: half the key width, 16 to 64."""
    pack: bool = True
    """Use the CPU's packed products where they exist."""
    spare_bytes: int = 1 << 28
    """Largest tape that is kept, unused, for the next window of the same shape: on the CPU, new
    memory costs a page fault per 4 KiB. 0 keeps none."""
    compiled: bool = True
    """Use compiled code between the products where a C compiler is at hand."""


@dataclass(frozen=True)
class Call:
    """What a scan is asked for, besides the tensors that autograd looks at."""

    sizes: Sizes
    names: list[str]
    """Names of the parameters among the tensors, as `stages.flatten` gives them."""
    has_memory: bool
    resets_BT: Tensor | None
    mask_BT: Tensor | None
    recompute: bool
    """Keep no more than about sqrt(T) tokens, whatever the memory budget."""
    settings: ScanSettings
    matrix_dtype: torch.dtype
    keep: bool
    """Whether a backward may follow."""


@dataclass
class Inputs:
    """The tensors of a call, by role."""

    token_BTD: Tensor
    predicted_BD: Tensor
    grounded_BD: Tensor
    memory_PKV: Tensor | None
    named: dict[str, Tensor]


def tape_bytes_per_token(s: Sizes, chunk: int) -> int:
    """Bytes that a `Tape` takes per token of the window."""
    per_row = 2 * s.state + s.heads
    for i in range(s.layers):
        c = s.columns(i)
        per_row += 2 * c["all"].stop - s.ffn + s.state + s.ffn + s.answer
    memory = s.value * (s.key // chunk + 1) + s.all_reads * (s.key + s.value) + chunk
    itemsize = torch.finfo(s.dtype).bits // 8
    return itemsize * (s.batch * per_row + s.pairs * memory)


_spare: list[tuple[tuple[Sizes, int, int], Tape]] = []
"""At most one tape that no window uses, with what it fits."""


def _take_tape(s: Sizes, steps: int, chunk: int) -> Tape:
    """A tape for `steps` tokens: the spare one if it fits, which then is spare no more."""
    while _spare:
        try:
            fits, tape = _spare.pop()
        except IndexError:  # another thread was faster
            break
        if fits == (s, steps, chunk):
            return tape
    return Tape(s, steps, chunk)


def _leave_tape(s: Sizes, tape: Tape, most_bytes: int) -> None:
    """Keep a tape for the next window if it is not too large."""
    size = tape.steps * tape_bytes_per_token(s, tape.chunk)
    # Tensors made in inference mode can never be written in training.
    if torch.is_inference_mode_enabled():
        return
    if s.device.type == "cpu" and size <= most_bytes:
        _spare[:] = [((s, tape.steps, tape.chunk), tape)]


class Run:
    """The two walks over one window, and what the second needs of the first."""

    def __init__(self, call: Call) -> None:
        self.call, self.sizes = call, call.sizes
        self.chunk = call.settings.chunk_tokens or chunk_tokens(call.sizes)
        self.starts: list[Walk] = []
        self.tape: Tape | None = None

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Predicted states [B, T, D] and the state after the last token."""
        s, inputs = self.sizes, self._inputs(tensors)
        time = inputs.token_BTD.shape[1]
        self.segment = self._segment_tokens(time)
        self.window = self._window(inputs, time)
        products = self._products(inputs.named, transposed=False)
        walk = self._start(inputs)
        outputs_TBD = empty(s, time, s.batch, s.state)
        tokens, outputs = inputs.token_BTD.unbind(1), outputs_TBD.unbind(0)
        tape = _take_tape(s, min(self.segment, time), self.chunk)
        for first in range(0, time, self.segment):
            part = slice(first, first + self.segment)
            if self.call.keep:
                self.starts.append(_copy(walk))
            walk = forward_segment(
                self.window, products, tape, walk, tokens[part], outputs[part], first
            )
        if self.call.keep and len(self.starts) == 1:
            self.tape = tape
        if self.tape is None:
            _leave_tape(s, tape, self.call.settings.spare_bytes)
        after = [outputs_TBD[-1].clone(), walk.grounded_BD]
        if walk.memory_PKV is not None:
            after.append(walk.memory_PKV.view(s.batch, s.heads, s.key, s.value))
        return outputs_TBD.transpose(0, 1), *after

    def backward(
        self, tensors: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of the tensors, from those of the predicted states and the final state."""
        s, inputs = self.sizes, self._inputs(tensors)
        time = inputs.token_BTD.shape[1]
        arriving = self._arriving(grads[1:])
        weights = (
            WeightGrads(s, self.call.matrix_dtype)
            if any(needs[len(tensors) - len(self.call.names) :])
            else None
        )
        transposed = self._products(inputs.named, transposed=True)
        replayed = None if self.tape is not None else self._products(inputs.named, transposed=False)
        token_grads_TBD = empty(s, time, s.batch, s.state)
        zeros = inputs.predicted_BD.new_zeros(1).expand(s.batch, s.state)
        output_grads = (zeros,) * time if grads[0] is None else grads[0].unbind(1)
        tokens, token_grads = inputs.token_BTD.unbind(1), token_grads_TBD.unbind(0)
        tape = self.tape
        for n in reversed(range(len(self.starts))):
            first = n * self.segment
            part = slice(first, min(first + self.segment, time))
            if replayed is not None:
                tape = tape or _take_tape(s, min(self.segment, time), self.chunk)
                scratch = empty(s, part.stop - first, s.batch, s.state).unbind(0)
                walk = _copy(self.starts[n])
                forward_segment(self.window, replayed, tape, walk, tokens[part], scratch, first)
            assert tape is not None
            backward_segment(
                self.window,
                transposed,
                tape,
                arriving,
                output_grads[part],
                token_grads[part],
                first,
                None if weights is None else weights.key_bias_HK,
            )
            if weights is not None:
                weights.add(tape, part.stop - first)
        assert tape is not None
        _leave_tape(s, tape, self.call.settings.spare_bytes)
        self.tape = tape = None
        start_grads = self._start_grads(inputs, arriving, weights)
        named_grads = {} if weights is None else weights.unfold(inputs.named)
        found: list[Tensor | None] = [token_grads_TBD.transpose(0, 1), *start_grads]
        found += [named_grads.get(name) for name in self.call.names]
        return [g if need else None for g, need in zip(found, needs, strict=True)]

    def _inputs(self, tensors: tuple[Tensor, ...]) -> Inputs:
        s, states = self.sizes, 4 if self.call.has_memory else 3
        memory = tensors[3].reshape(s.pairs, s.key, s.value) if self.call.has_memory else None
        named = dict(zip(self.call.names, tensors[states:], strict=True))
        return Inputs(tensors[0], tensors[1], tensors[2], memory, named)

    def _segment_tokens(self, time: int) -> int:
        """Tokens per tape: the window, what the budget allows, or a chunk if nothing is kept."""
        if not self.call.keep:
            return self.chunk
        most = self.call.settings.memory_budget_bytes // tape_bytes_per_token(
            self.sizes, self.chunk
        )
        if self.call.recompute:
            most = min(most, segment_tokens(time))
        return min(time, max(1, most // self.chunk) * self.chunk)

    def _window(self, inputs: Inputs, time: int) -> Window:
        s, named = self.sizes, inputs.named
        rate = bias = empty(s, 0)
        if s.heads:
            rate = -named["memory.A_log_H"].to(s.dtype).exp()
            bias = named["memory.key_bias_X"].to(s.dtype, copy=True).view(s.heads, s.key)
        return Window(
            sizes=s,
            eps_1=torch.full((1,), s.eps, dtype=s.dtype, device=s.device),
            decay_rate_H=rate,
            key_bias_HK=bias,
            resets=_flagged(self.call.resets_BT, time, True),
            kept=_flagged(self.call.mask_BT, time, False),
            compiled=self.call.settings.compiled and native.available(s),
        )

    def _products(self, named: dict[str, Tensor], transposed: bool) -> Products:
        """The packed matrices of one direction."""
        s, call = self.sizes, self.call

        def packed(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
            weight = (weight.T if transposed else weight).to(call.matrix_dtype)
            bias = None if transposed or bias is None else bias.to(s.dtype, copy=True)
            return PackedLinear(weight, s.batch, bias, s.dtype, call.settings.pack)

        gate = packed(stages.fold_gate(named, s), named["ground.gate_bias_D"])
        layers = []
        for i in range(s.layers):
            into = packed(*stages.fold_layer(named, s, i))
            layers.append((into, packed(stages.fold_out(named, s, i))))
        return Products(gate, layers)

    def _key_matrix(self, named: dict[str, Tensor]) -> Tensor:
        folded = named["memory.key_XD"].to(self.sizes.dtype) * named["memory.write_norm_D"]
        return folded.to(self.call.matrix_dtype)

    def _start(self, inputs: Inputs) -> Walk:
        """The state before the window, with the first token's key and what it recalls."""
        s, walk = self.sizes, Walk(inputs.predicted_BD, inputs.grounded_BD, inputs.memory_PKV)
        if inputs.memory_PKV is None:
            return walk
        self.first_normed, self.first_scale = empty(s, s.batch, s.state), empty(s, s.batch, 1)
        normalise(inputs.grounded_BD, self.window.eps_1, self.first_normed, self.first_scale)
        matrix = self._key_matrix(inputs.named)
        raw = F.linear(self.first_normed.to(matrix.dtype), matrix).to(s.dtype)
        raw = raw.view(s.batch, s.heads, s.key)
        reset = self.window.resets[0]
        if reset is not None:
            raw.masked_fill_(reset.unsqueeze(-1), 0)
        raw += self.window.key_bias_HK
        key, scale = torch.empty_like(raw), empty(s, s.batch, s.heads, 1)
        unit(raw, key, scale, UNIT_EPS)
        self.first_slope = (raw > 0) * scale
        walk.key_PK = key.view(s.pairs, s.key)
        recalled = torch.bmm(walk.key_PK.unsqueeze(1), inputs.memory_PKV).squeeze(1)
        if reset is not None:
            recalled.view(s.batch, -1).masked_fill_(reset, 0)
        walk.recalled_PV = recalled
        return walk

    def _arriving(self, grads: tuple[Tensor | None, ...]) -> Arriving:
        """Gradients of the final state, zero where nothing arrives."""
        s = self.sizes
        predicted = grads[0] if grads[0] is not None else empty(s, s.batch, s.state).zero_()
        arriving = Arriving(predicted, grads[1])
        if s.heads:
            memory = grads[2] if grads[2] is not None else empty(s, s.pairs, s.key, s.value).zero_()
            arriving.memory_PKV = memory.reshape(s.pairs, s.key, s.value)
            arriving.key_PK = empty(s, s.pairs, s.key).zero_()
            arriving.recalled_BHV = empty(s, s.batch, s.heads, s.value).zero_()
        return arriving

    def _start_grads(
        self, inputs: Inputs, arriving: Arriving, weights: "WeightGrads | None"
    ) -> list[Tensor]:
        """Gradients of the state before the window; the first key's go on to its parameters."""
        s, grounded = self.sizes, arriving.grounded_BD
        if grounded is None:
            grounded = empty(s, s.batch, s.state).zero_()
        if inputs.memory_PKV is None:
            return [arriving.predicted_BD, grounded]
        key, recalled = self.starts[0].key_PK, arriving.recalled_BHV
        assert key is not None
        assert recalled is not None
        assert arriving.memory_PKV is not None
        assert arriving.key_PK is not None
        recalled_PV1 = recalled.reshape(s.pairs, s.value, 1)
        memory = torch.baddbmm(arriving.memory_PKV, key.unsqueeze(-1), recalled_PV1.mT)
        grad = arriving.key_PK + torch.bmm(inputs.memory_PKV, recalled_PV1).squeeze(-1)
        grad = (grad - key * (grad * key).sum(-1, keepdim=True)).view(s.batch, s.heads, s.key)
        grad = grad * self.first_slope
        if weights is not None:
            weights.key_bias_HK += grad.sum(0)
        if self.window.resets[0] is not None:
            grad = grad.masked_fill(self.window.resets[0].unsqueeze(-1), 0)
        raw, matrix = grad.flatten(1), self._key_matrix(inputs.named)
        if weights is not None:
            weights.first_key = raw.T @ self.first_normed
        normed = (raw.to(matrix.dtype) @ matrix).to(s.dtype)
        mean = (normed * self.first_normed).mean(-1, keepdim=True)
        grounded = grounded + (normed - self.first_normed * mean) * self.first_scale
        return [arriving.predicted_BD, grounded, memory.view(s.batch, s.heads, s.key, s.value)]


class WeightGrads:
    """Gradients of the folded matrices, one product over all rows of a tape at a time."""

    def __init__(self, s: Sizes, matrix_dtype: torch.dtype) -> None:
        self.sizes, self.matrix_dtype = s, matrix_dtype
        self.key_bias_HK = empty(s, s.heads, s.key).zero_()
        self.first_key: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, tape: Tape, count: int) -> None:
        """Add the rows of a tape's first `count` tokens, after the reverse walk."""
        s = self.sizes
        self._product("gate", tape.gate_TBD[:count], tape.normed_TBD[:count])
        self._add("gate_bias", tape.gate_TBD[:count].sum((0, 1)))
        self._add("A_log", tape.log_decay_TBH[:count].sum((0, 1)))
        for i, layer in enumerate(tape.layers):
            into = layer.into_TBN[:count]
            self._product(f"into.{i}", into, layer.normed_TBD[:count])
            biased = slice(layer.columns["gate"].start, layer.columns["reads"].stop)
            bias = empty(s, layer.columns["all"].stop).zero_()
            torch.sum(into[..., biased], (0, 1), out=bias[biased])
            self._add(f"bias.{i}", bias)
            width = s.ffn + s.answer
            grads = layer.sigmoids_TBN[:count, :, width : width + s.state]
            self._product(f"out.{i}", grads, layer.inner_TBI[:count])

    def _product(self, name: str, grads_TBN: Tensor, inputs_TBK: Tensor) -> None:
        grads, inputs = (x.flatten(0, 1).to(self.matrix_dtype) for x in (grads_TBN, inputs_TBK))
        self._add(name, product(grads.T, inputs).to(self.sizes.dtype))

    def _add(self, name: str, value: Tensor) -> None:
        if name in self._sums:
            self._sums[name] += value
        else:
            self._sums[name] = value

    def unfold(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of every parameter, each in its parameter's dtype."""
        s, sums = self.sizes, self._sums
        grads = {
            k: torch.empty_like(v, dtype=s.dtype)
            if stages.is_matrix(k)
            else torch.zeros_like(v, dtype=s.dtype)
            for k, v in named.items()
        }
        stages.unfold_gate(grads, named, sums["gate"])
        grads["ground.gate_bias_D"] = sums["gate_bias"]
        if s.heads:
            key = next(b for b in stages.layer_blocks(s, 0) if b.matrix == "memory.key_XD")
            columns = s.columns(0)
            block = stages.block_rows(sums["into.0"], key, columns, s.heads)
            assert self.first_key is not None
            block += self.first_key.view_as(block)
            stages.block_rows(sums["bias.0"], key, columns, s.heads).add_(self.key_bias_HK)
            grads["memory.A_log_H"] = sums["A_log"]
        for i in range(s.layers):
            stages.unfold_layer(grads, named, s, i, sums.pop(f"into.{i}"), sums[f"bias.{i}"])
            stages.unfold_out(grads, named, s, i, sums.pop(f"out.{i}"))
        return {k: g.to(named[k].dtype) for k, g in grads.items()}


def _copy(walk: Walk) -> Walk:
    """A state that later segments do not overwrite."""
    copies: dict[str, Any] = {k: x if x is None else x.clone() for k, x in vars(walk).items()}
    return replace(walk, **copies)


def _flagged(flags_BT: Tensor | None, time: int, wanted: bool) -> list[Tensor | None]:
    """Per token the flags as [B, 1], or None where no row has the wanted one."""
    if flags_BT is None:
        return [None] * time
    flags_BT = flags_BT.bool()
    some = (flags_BT == wanted).any(0).tolist()
    return [
        f.unsqueeze(1) if any_ else None for f, any_ in zip(flags_BT.unbind(1), some, strict=True)
    ]
