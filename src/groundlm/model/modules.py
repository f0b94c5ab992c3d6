"""The parameters of a GPN by name; `cell.py` says what is done with them."""

import torch
from torch import Tensor, nn

from groundlm.model import cell
from groundlm.model.config import GPNConfig


def tensor_of(module: nn.Module, child: str, name: str = "weight") -> Tensor:
    """`module.child.name`, past `nn.Module.__getattr__`, which is dear in a single step."""
    owner = module._modules[child]
    assert owner is not None
    tensor = owner._parameters.get(name)
    return getattr(owner, name) if tensor is None else tensor  # a parametrised weight


class NormWeight(nn.Module):
    """The weight of an RMS norm; `cell.rms_norm` applies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Matrix(nn.Linear):
    """A linear map that knows how it starts: `lecun`, `normal` (initializer_range) or `zeros`."""

    def __init__(self, fan_in: int, fan_out: int, bias: bool = False, start: str = "lecun") -> None:
        super().__init__(fan_in, fan_out, bias=bias)
        self.start = start


class Ground(nn.Module):
    """Token side and gate of the grounding step."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.token_norm = NormWeight(c.embedding_size)
        self.token_proj = Matrix(c.embedding_size, c.state_size)
        self.gate_norm = NormWeight(c.state_size)
        self.gate = Matrix(c.state_size, c.state_size, bias=True, start="zeros")

    def params(self) -> cell.GroundParams:
        return cell.GroundParams(
            tensor_of(self, "gate_norm"), tensor_of(self, "gate"), tensor_of(self, "gate", "bias")
        )


class Memory(nn.Module):
    """The write side of the shared memory."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.write_norm = NormWeight(c.state_size)
        self.key = Matrix(c.state_size, c.num_heads * c.head_k_dim, bias=True)
        self.value = Matrix(c.state_size, c.num_heads * c.head_v_dim)
        self.beta = Matrix(c.state_size, c.num_heads)
        self.decay = Matrix(c.state_size, c.num_heads)
        self.A_log = nn.Parameter(torch.empty(c.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(c.num_heads))

    def params(self) -> cell.MemoryParams:
        return cell.MemoryParams(
            tensor_of(self, "write_norm"),
            tensor_of(self, "key"),
            tensor_of(self, "key", "bias"),
            tensor_of(self, "value"),
            tensor_of(self, "beta"),
            tensor_of(self, "decay"),
            self.A_log,
            self.dt_bias,
        )


class Read(nn.Module):
    """One layer's query of the memory and the way back to the state."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.query = Matrix(c.state_size, c.num_heads * c.head_k_dim, bias=True)
        self.gate = Matrix(c.state_size, c.num_heads * c.head_v_dim)
        self.out_norm = NormWeight(c.num_heads * c.head_v_dim)
        self.out = Matrix(c.num_heads * c.head_v_dim, c.state_size, start="normal")

    def params(self) -> cell.ReadParams:
        return cell.ReadParams(
            tensor_of(self, "norm"),
            tensor_of(self, "query"),
            tensor_of(self, "query", "bias"),
            tensor_of(self, "gate"),
            tensor_of(self, "out_norm"),
            tensor_of(self, "out"),
        )


class FFN(nn.Module):
    """SwiGLU; `up` holds the swish half above the linear half."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.up = Matrix(c.state_size, 2 * c.ffn_size)
        self.down = Matrix(c.ffn_size, c.state_size, start="zeros")


class Predict(nn.Module):
    """One predict layer."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.ffn = FFN(c)
        self.gate_norm = NormWeight(c.state_size)
        self.gate = Matrix(c.state_size, c.state_size, bias=True, start="zeros")
        self.read = Read(c) if c.num_heads else None

    def params(self) -> cell.PredictParams:
        ffn, read = self.ffn, self.read
        return cell.PredictParams(
            tensor_of(ffn, "norm"),
            tensor_of(ffn, "up"),
            tensor_of(ffn, "down"),
            tensor_of(self, "gate_norm"),
            tensor_of(self, "gate"),
            tensor_of(self, "gate", "bias"),
            None if read is None else read.params(),
        )


class Decode(nn.Module):
    """From the predicted state to the embedding space; the embedding itself is shared."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.proj = Matrix(c.state_size, c.embedding_size)
        self.bias = nn.Parameter(torch.zeros(c.embedding_size)) if c.decoder_bias else None
