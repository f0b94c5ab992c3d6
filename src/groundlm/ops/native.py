"""The walk over clean chunks with compiled C between the products, on the CPU.

A token of a small model is a hundred tiny torch calls, each of which costs more than its numbers.
Here the work between two products is one call into compiled C (see `compiled`); where that is not
to be had, the plain walks do the same in torch. Tokens with padding or boundaries always take the
plain walk.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groundlm import compiled
from groundlm.ops.native_source import source
from groundlm.ops.stages import Sizes, empty

if TYPE_CHECKING:
    from groundlm.ops.fused_backward import Arriving
    from groundlm.ops.fused_forward import Products, Tape, Walk

REALS = {torch.float32: "float", torch.float64: "double"}


def library(real: str) -> ctypes.CDLL | None:
    """The compiled functions for `float` or `double`; None where there is no compiled code."""
    return compiled.load(source(real), "the fused scan")


def available(s: Sizes) -> bool:
    """Whether compiled code can walk tensors of this dtype on this device."""
    return s.device.type == "cpu" and compiled.allowed() and library(REALS[s.dtype]) is not None


def _struct(fields: str, pointers: str) -> type[ctypes.Structure]:
    names: list[tuple[str, Any]] = [(n, ctypes.c_long) for n in fields.split()]
    names += [(n, ctypes.c_void_p) for n in pointers.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": names})


_Layer = _struct(
    "width sigmoids_width first count write gate beta decay read_columns value_columns",
    "into normed scale inner sigmoids read_scale unit_scale",
)
_Memory = _struct("", "rows reads factors answers keys log_decay rate")
_Reverse = _struct("count", "scores answer_grads overlaps write_grads key_grads key recalled decay")


@functools.cache
def _dims(dtype: torch.dtype) -> type[ctypes.Structure]:
    """The C struct of sizes for one dtype."""
    real = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    fields = [*[(n, ctypes.c_long) for n in "bdfhkvrc"], ("eps", real)]
    return type("Dims", (ctypes.Structure,), {"_fields_": fields})


class NativeTape:
    """Addresses of a tape's buffers, and the walks over one chunk of it."""

    def __init__(self, s: Sizes, tape: Tape) -> None:
        # The tape owns this object; a reference back would keep its memory until the garbage
        # collector comes by.
        self.s, self._tape = s, weakref.ref(tape)
        dims = _dims(s.dtype)
        values = (s.batch, s.state, s.ffn, s.heads, s.key, s.value, s.all_reads, tape.chunk)
        self._dims = dims(*values, s.eps)
        self.dims = ctypes.addressof(self._dims)
        self._layers = [self._layer(i) for i in range(s.layers)]
        self.layers = [ctypes.addressof(x) for x in self._layers]
        self.memory: int | None = None
        if tape.memory is not None:
            m = tape.memory
            bases = (m.rows[0], m.reads[0], m.factors[0], m.answers_TPRV, m.keys)
            self._memory = _Memory(*(x.data_ptr() for x in (*bases, tape.log_decay_TBH)))
            self.memory = ctypes.addressof(self._memory)
        self._bind(REALS[s.dtype])

    @property
    def tape(self) -> Tape:
        """The tape that is walked."""
        tape = self._tape()
        assert tape is not None
        return tape

    def for_window(self, decay_rate_H: Tensor) -> NativeTape:
        """This tape with the decay rates of the window that is to walk on it."""
        if self.memory is not None:
            self._rate, self._memory.rate = decay_rate_H, decay_rate_H.data_ptr()
        return self

    def _layer(self, i: int) -> ctypes.Structure:
        t, s = self.tape.layers[i], self.s
        c = t.columns
        buffers = (
            t.into_TBN, t.normed_TBD, t.scale_TB1, t.inner_TBI, t.sigmoids_TBN, t.read_scale_TB1,
            t.unit_scale_TBHR1,
        )  # fmt: skip
        return _Layer(
            c["all"].stop, c["decay"].stop - s.ffn, 0 if i == 0 else i + 1, s.reads(i), i == 0,
            c["gate"].start, c["beta"].start, c["decay"].start, c["reads"].start, c["value"].start,
            *(x.data_ptr() for x in buffers),
        )  # fmt: skip

    def _bind(self, real: str) -> None:
        loaded = library(real)
        assert loaded is not None
        for name in ARGUMENTS:
            setattr(self, f"c_{name}", _function(loaded, name, real))

    c_normalise: Callable[..., None]
    c_ground: Callable[..., None]
    c_layer: Callable[..., None]
    c_carry: Callable[..., None]
    c_reverse_layer: Callable[..., None]
    c_unnormalise: Callable[..., None]
    c_reverse_ground: Callable[..., None]

    def forward(
        self,
        products: Products,
        walk: Walk,
        tokens: Sequence[Tensor],
        outputs: Sequence[Tensor],
        span: range,
    ) -> None:
        """Walk the tape's tokens `span` (one chunk, opened); `walk` moves on in place."""
        s, tape, dims = self.s, self.tape, self.dims
        before = walk.predicted_BD.contiguous()
        normed, scale = tape.normed, tape.scale
        at = span.start
        self.c_normalise(dims, _at(before), _at(normed[at]), _at(scale[at]))
        key = recalled = None
        if tape.memory is not None:
            assert walk.key_PK is not None
            assert walk.recalled_PV is not None
            key, recalled = walk.key_PK, walk.recalled_PV
        key_at = (*_where(key), *_where(recalled))
        y = before
        for step in span:
            z = products.gate(normed[step])
            token, layer = tokens[step], tape.layers[0]
            token = token if token.stride(1) == 1 else token.contiguous()
            y = empty(s, s.batch, s.state)
            self.c_ground(
                dims, _at(z), _at(token), token.stride(0), _at(before), _at(tape.gate[step]),
                _at(y), _at(layer.normed[step]), _at(layer.scale[step]),
            )  # fmt: skip
            walk.grounded_BD = y
            for i, (into, out) in enumerate(products.layers):
                layer, address = tape.layers[i], self.layers[i]
                result = into(layer.normed[step])
                self.c_layer(dims, address, self.memory, step, _at(result), *key_at)
                z = out(layer.inner[step])
                onto: tuple[int | None, int | None] = (None, None)
                if i + 1 < s.layers:
                    after, following = empty(s, s.batch, s.state), tape.layers[i + 1]
                    onto = (_at(following.normed[step]), _at(following.scale[step]))
                else:
                    after = outputs[step]
                    if step + 1 < span.stop:
                        onto = (_at(normed[step + 1]), _at(scale[step + 1]))
                self.c_carry(dims, address, step, _at(z), _at(y), _at(after), *onto)
                y = after
            before = y
            if tape.memory is not None:
                j = step % tape.chunk
                key = tape.memory.slots(j, 1, 1)[:, 0]
                recalled = tape.memory.answers[step][:, 1]
                key_at = (*_where(key), *_where(recalled))
        walk.predicted_BD, walk.key_PK, walk.recalled_PV = y, key, recalled

    def backward(
        self,
        products: Products,
        arriving: Arriving,
        output_grads: Sequence[Tensor],
        token_grads: Sequence[Tensor],
        span: range,
    ) -> None:
        """Walk the tape's tokens `span` (one chunk, opened) in reverse; `arriving` moves on."""
        s, tape, dims = self.s, self.tape, self.dims
        reverse, held = self._reverse(arriving, len(span))
        grad = (arriving.predicted_BD + output_grads[span.stop - 1]).contiguous()
        grounded = arriving.grounded_BD
        extra_ground = None if grounded is None else _rows(grounded)
        for step in reversed(span):
            for i in reversed(range(s.layers)):
                layer = tape.layers[i]
                direct = empty(s, s.batch, s.state)
                inner = products.layers[i][1](grad)
                self.c_reverse_layer(
                    dims, self.layers[i], self.memory, reverse, step, _at(grad), _at(inner),
                    _at(direct),
                )  # fmt: skip
                normed_grad = products.layers[i][0](layer.into[step])
                shape = (dims, _at(normed_grad), _at(layer.normed[step]), _at(layer.scale[step]))
                if i:
                    self.c_unnormalise(*shape, _at(direct), None, 0)
                    grad = direct
            gate = tape.gate[step]
            self.c_reverse_ground(
                *shape, _at(direct), *_where(extra_ground), _at(token_grads[step]), _at(gate),
                _at(tape.normed[step]), _at(tape.scale[step]),
            )  # fmt: skip
            extra_ground = None
            normed_grad = products.gate(gate)
            extra = _rows(output_grads[step - 1]) if step > span.start else None
            self.c_unnormalise(
                dims, _at(normed_grad), _at(tape.normed[step]), _at(tape.scale[step]),
                _at(direct), *_where(extra),
            )  # fmt: skip
            grad = direct
        arriving.predicted_BD, arriving.grounded_BD = grad, None
        del held

    def _reverse(self, arriving: Arriving, count: int) -> tuple[int | None, object]:
        """Address of the chunk's reverse buffers (and what must stay alive with it)."""
        m = self.tape.memory
        if m is None:
            return None, None
        assert arriving.key_PK is not None
        assert arriving.recalled_BHV is not None
        assert arriving.decay_BH is not None
        arriving.key_PK = arriving.key_PK.contiguous()
        arriving.recalled_BHV = arriving.recalled_BHV.contiguous()
        arriving.decay_BH = arriving.decay_BH.contiguous()
        buffers = (
            m.scores, m.answer_grads, m.overlaps, m.write_grads, m.key_grads, arriving.key_PK,
            arriving.recalled_BHV, arriving.decay_BH,
        )  # fmt: skip
        struct = _Reverse(count, *(x.data_ptr() for x in buffers))
        return ctypes.addressof(struct), struct


_at = Tensor.data_ptr


def _rows(x: Tensor) -> Tensor:
    """x [B, D] with neighbouring columns (rows may lie anywhere)."""
    return x if x.stride(1) == 1 else x.contiguous()


def _where(x: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if x is None else (x.data_ptr(), x.stride(0))


ARGUMENTS = {
    "normalise": 4, "ground": 9, "layer": 9, "carry": 8, "reverse_layer": 8, "unnormalise": 7,
    "reverse_ground": 11,
}  # fmt: skip


def _function(loaded: ctypes.CDLL, name: str, real: str) -> Callable[..., None]:
    """A C function; each argument is an address or a long >= 0, and both pass alike."""
    function = loaded[f"{name}_{real}"]
    function.argtypes, function.restype = [ctypes.c_void_p] * ARGUMENTS[name], None
    return function
