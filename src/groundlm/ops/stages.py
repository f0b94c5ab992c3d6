"""One matrix per stage: norms folded in, all products that read the same vector side by side.

`W rms(x; w) = (W diag(w)) (x / rms(x))`, so every norm weight moves into the matrices behind it and
the loop over time keeps only the statistic `1 / rms(x)`, one per state vector. The same holds for
the norm in front of `W_o`. After the backward pass `fold` is undone by `unfold`:
`dW = dW' diag(w)`, `dw = sum over rows of dW' * W`.

Columns of the first product of a predict layer, in this order (all but the first three and
`beta`, `decay`, `value` of the first layer only exist with memory):

    linear F | swish F | read gate Y | gate D | beta H | decay H | reads H*R*K | value Y

`reads` of the first layer holds, per head, its query and the key of the next token's write (both
come from s^g_t); of further layers the query alone. Sigmoids and swishes lie side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from groundlm.model.cell import CellParams

DOT_ROWS = 256


@dataclass(frozen=True)
class Sizes:
    """Widths of the recurrence."""

    batch: int
    state: int
    ffn: int
    layers: int
    heads: int
    key: int
    value: int
    eps: float
    dtype: torch.dtype
    """Storage and arithmetic outside the products: float32 or float64."""
    device: torch.device

    @property
    def pairs(self) -> int:
        """Memories walked side by side (B * H)."""
        return self.batch * self.heads

    @property
    def answer(self) -> int:
        """Values of all heads together (Y = H * V)."""
        return self.heads * self.value

    def reads(self, layer: int) -> int:
        """Vectors that the layer's first product brings to the memory."""
        return 0 if not self.heads else 2 if layer == 0 else 1

    @property
    def all_reads(self) -> int:
        """Reads of the memory per token: every layer's query and the next key (R)."""
        return self.layers + 1 if self.heads else 0

    def columns(self, layer: int) -> dict[str, slice]:
        """Where each part of the layer's first product lies."""
        first = self.heads and layer == 0
        widths = {
            "linear": self.ffn,
            "swish": self.ffn,
            "read_gate": self.answer,
            "gate": self.state,
            "beta": self.heads if first else 0,
            "decay": self.heads if first else 0,
            "reads": self.heads * self.reads(layer) * self.key,
            "value": self.answer if first else 0,
        }
        slices, start = {}, 0
        for name, width in widths.items():
            slices[name] = slice(start, start + width)
            start += width
        slices["all"] = slice(0, start)
        return slices


def sizes_of(params: CellParams, state_BD: Tensor) -> Sizes:
    """The widths that the shapes of the parameters and of a state tell."""
    layer, memory = params.predict[0], params.memory
    heads = 0 if memory is None else memory.A_log_H.shape[0]
    return Sizes(
        batch=state_BD.shape[0],
        state=params.ground.gate_DD.shape[0],
        ffn=layer.ffn_down_DF.shape[1],
        layers=len(params.predict),
        heads=heads,
        key=0 if memory is None else memory.key_XD.shape[0] // heads,
        value=0 if memory is None else memory.value_YD.shape[0] // heads,
        eps=params.norm_eps,
        dtype=state_BD.dtype,
        device=state_BD.device,
    )


@dataclass(frozen=True)
class Block:
    """Rows of one matrix inside a stage: `matrix` [n, K] behind the norm weight `norm` [K]."""

    matrix: str
    norm: str
    column: str
    part: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal groups of the matrix's rows; for `reads`, the i-th per head."""
    bias: str | None = None


def layer_blocks(s: Sizes, layer: int) -> list[Block]:
    """What stands in the first product of a predict layer; names as `flatten` gives them."""
    own = f"predict.{layer}."
    blocks = [
        Block(own + "ffn_up_2FD", own + "ffn_norm_D", "linear", (1, 2)),
        Block(own + "ffn_up_2FD", own + "ffn_norm_D", "swish", (0, 2)),
        Block(own + "gate_DD", own + "gate_norm_D", "gate", bias=own + "gate_bias_D"),
    ]
    if not s.heads:
        return blocks
    read, write, reads = own + "read.", "memory.", s.reads(layer)
    query, norm = read + "query_XD", read + "norm_D"
    blocks += [
        Block(read + "gate_YD", norm, "read_gate"),
        Block(query, norm, "reads", (0, reads), bias=read + "query_bias_X"),
    ]
    if layer == 0:
        norm = write + "write_norm_D"
        blocks += [
            Block(write + "key_XD", norm, "reads", (1, 2), bias=write + "key_bias_X"),
            Block(write + "beta_HD", norm, "beta"),
            Block(write + "decay_HD", norm, "decay", bias=write + "dt_bias_H"),
            Block(write + "value_YD", norm, "value"),
        ]
    return blocks


def flatten(params: CellParams) -> dict[str, Tensor]:
    """Every tensor of the parameters under a dotted name, in a fixed order."""
    named: dict[str, Tensor] = {}
    for group, prefix in ((params.ground, "ground."), (params.memory, "memory.")):
        if group is not None:
            named |= {prefix + k: v for k, v in group._asdict().items()}
    for i, layer in enumerate(params.predict):
        fields = layer._asdict()
        read = fields.pop("read")
        named |= {f"predict.{i}.{k}": v for k, v in fields.items()}
        if read is not None and params.memory is not None:
            named |= {f"predict.{i}.read.{k}": v for k, v in read._asdict().items()}
    return named


def is_matrix(name: str) -> bool:
    """Whether the parameter multiplies (and so runs in the compute dtype)."""
    return flat_suffix(name) in ("DD", "2FD", "DF", "XD", "YD", "DY", "HD")


def flat_suffix(name: str) -> str:
    """The shape legend at the end of a parameter's name."""
    return name.rsplit("_", 1)[1]


def block_rows(full: Tensor, block: Block, columns: dict[str, slice], heads: int) -> Tensor:
    """View of the block's rows in a stage-wide tensor [N, ...], shaped like the matrix's part."""
    rows = full[columns[block.column]]
    if block.column != "reads":
        return rows
    index, reads = block.part
    return rows.view(heads, reads, -1, *full.shape[1:])[:, index]


def matrix_part(matrix: Tensor, block: Block, heads: int) -> Tensor:
    """The rows of `matrix` that the block holds, shaped like `block_rows`."""
    if block.column == "reads":
        return matrix.unflatten(0, (heads, -1))
    index, parts = block.part
    return matrix.chunk(parts)[index]


def fold_layer(named: dict[str, Tensor], s: Sizes, layer: int) -> tuple[Tensor, Tensor]:
    """The first product of a layer: matrix [N, D] and bias [N], both in the state's dtype."""
    columns = s.columns(layer)
    weight = empty(s, columns["all"].stop, s.state)
    bias = empty(s, columns["all"].stop).zero_()
    for block in layer_blocks(s, layer):
        part = matrix_part(named[block.matrix], block, s.heads)
        out = block_rows(weight, block, columns, s.heads)
        torch.mul(part.to(s.dtype), named[block.norm].to(s.dtype), out=out)
        if block.bias is not None:
            part = matrix_part(named[block.bias], block, s.heads)
            block_rows(bias, block, columns, s.heads).copy_(part)
    return weight, bias


def unfold_layer(
    grads: dict[str, Tensor],
    named: dict[str, Tensor],
    s: Sizes,
    layer: int,
    weight_grad: Tensor,
    bias_grad: Tensor,
) -> None:
    """Spread the gradients of `fold_layer`'s matrix and bias over the parameters, into `grads`."""
    columns = s.columns(layer)
    for block in layer_blocks(s, layer):
        d_part = block_rows(weight_grad, block, columns, s.heads)
        part = matrix_part(named[block.matrix], block, s.heads)
        grads[block.norm] += column_dots(d_part.flatten(0, -2), part.flatten(0, -2))
        own = matrix_part(grads[block.matrix], block, s.heads)
        torch.mul(d_part, named[block.norm].to(s.dtype), out=own)
        if block.bias is not None:
            matrix_part(grads[block.bias], block, s.heads).copy_(
                block_rows(bias_grad, block, columns, s.heads)
            )


def fold_out(named: dict[str, Tensor], s: Sizes, layer: int) -> Tensor:
    """The second product of a layer, `[W_down | W_o diag(w_o)]` [D, F + Y], state dtype."""
    folded, own = empty(s, s.state, s.ffn + s.answer), f"predict.{layer}."
    folded[:, : s.ffn] = named[own + "ffn_down_DF"]
    if s.heads:
        matrix, norm = named[own + "read.out_DY"], named[own + "read.out_norm_Y"]
        torch.mul(matrix.to(s.dtype), norm.to(s.dtype), out=folded[:, s.ffn :])
    return folded


def unfold_out(
    grads: dict[str, Tensor], named: dict[str, Tensor], s: Sizes, layer: int, weight_grad: Tensor
) -> None:
    """Spread the gradient of `fold_out`'s matrix over the parameters, into `grads`."""
    own = f"predict.{layer}."
    grads[own + "ffn_down_DF"].copy_(weight_grad[:, : s.ffn])
    if s.heads:
        d_part = weight_grad[:, s.ffn :]
        norm = named[own + "read.out_norm_Y"].to(s.dtype)
        grads[own + "read.out_norm_Y"] += column_dots(d_part, named[own + "read.out_DY"])
        torch.mul(d_part, norm, out=grads[own + "read.out_DY"])


def fold_gate(named: dict[str, Tensor], s: Sizes) -> Tensor:
    """The ground gate's matrix behind its norm, [D, D] in the state's dtype."""
    return named["ground.gate_DD"].to(s.dtype) * named["ground.gate_norm_D"].to(s.dtype)


def unfold_gate(grads: dict[str, Tensor], named: dict[str, Tensor], weight_grad: Tensor) -> None:
    """Spread the gradient of `fold_gate`'s matrix over the parameters, into `grads`."""
    grads["ground.gate_norm_D"] += column_dots(weight_grad, named["ground.gate_DD"])
    norm = named["ground.gate_norm_D"].to(weight_grad.dtype)
    torch.mul(weight_grad, norm, out=grads["ground.gate_DD"])


def column_dots(a_NK: Tensor, b_NK: Tensor) -> Tensor:
    """Sum over rows of `a * b`, [K], some rows at a time: the product never exists as a whole."""
    total = a_NK.new_zeros(a_NK.shape[1])
    for a, b in zip(a_NK.split(DOT_ROWS), b_NK.split(DOT_ROWS), strict=True):
        total += (a * b).sum(0)
    return total


def empty(s: Sizes, *shape: int) -> Tensor:
    """An uninitialised buffer in the state's dtype; the tests fill it with NaN."""
    return torch.empty(shape, dtype=s.dtype, device=s.device)
