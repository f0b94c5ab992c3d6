"""Random cells, states and windows for the tests of the scans."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from groundlm.model.cell import (
    Carry,
    CellParams,
    GroundParams,
    MemoryParams,
    PredictParams,
    ReadParams,
)
from groundlm.ops import stages


@dataclass
class Problem:
    """A window for a scan: random parameters, contributions, start state and upstream gradients."""

    batch: int = 2
    time: int = 7
    state: int = 5
    ffn: int = 6
    layers: int = 1
    heads: int = 2
    key: int = 3
    value: int = 4
    dtype: torch.dtype = torch.float64
    seed: int = 0
    resets: bool = False
    mask: bool = False
    params: CellParams = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        d, f, x, y = self.state, self.ffn, self.heads * self.key, self.heads * self.value
        r, n = self.randn, self.norm
        memory = None
        if self.heads:
            memory = MemoryParams(
                n(d), r(x, d), r(x), r(y, d), r(self.heads, d), r(self.heads, d),
                r(self.heads), r(self.heads),
            )  # fmt: skip
        layers = tuple(
            PredictParams(
                n(d), r(2 * f, d), r(d, f), n(d), r(d, d), r(d),
                ReadParams(n(d), r(x, d), r(x), r(y, d), n(y), r(d, y)) if self.heads else None,
            )
            for _ in range(self.layers)
        )  # fmt: skip
        ground = GroundParams(n(d), r(d, d), r(d))
        self.params = CellParams(ground, memory, layers, 1e-6)
        self.token_BTD = r(self.batch, self.time, d, scale=1)
        memory_shape = (self.batch, self.heads, self.key, self.value)
        self.carry: Carry = (
            r(self.batch, d, scale=1),
            r(self.batch, d, scale=1),
            r(*memory_shape) if self.heads else None,
        )
        self.resets_BT = self.flags(0.2) if self.resets else None
        self.mask_BT = self.flags(0.7) if self.mask else None

    def randn(self, *shape: int, scale: float | None = None) -> Tensor:
        """A leaf of the given shape; matrices are scaled so that the walk does not explode."""
        if scale is None:
            scale = 0.8 / shape[-1] ** 0.5 if len(shape) > 1 else 0.5
        x = scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.dtype).requires_grad_()

    def norm(self, width: int) -> Tensor:
        """The weight of a norm, about 1."""
        return (1 + 0.3 * self.randn(width, scale=1).detach()).requires_grad_()

    def flags(self, share: float) -> Tensor:
        return torch.rand(self.batch, self.time, generator=self.generator) < share

    def inputs(self) -> dict[str, Tensor]:
        """Everything that a gradient belongs to."""
        named = {"token": self.token_BTD, "predicted": self.carry[0], "grounded": self.carry[1]}
        if self.carry[2] is not None:
            named["memory"] = self.carry[2]
        return named | stages.flatten(self.params)

    def run(self, scan, **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # type: ignore[no-untyped-def]
        """Outputs, and gradients of every input under random upstream gradients on all of them."""
        predicted, carry = scan(
            self.token_BTD, self.params, self.carry, self.resets_BT, self.mask_BT, **options
        )
        outputs = {"out": predicted, "predicted": carry[0], "grounded": carry[1]}
        if carry[2] is not None:
            outputs["memory"] = carry[2]
        upstream = torch.Generator().manual_seed(1)
        weights = [
            torch.randn(x.shape, generator=upstream, dtype=torch.float64).to(x.dtype)
            for x in outputs.values()
        ]
        inputs = self.inputs()
        grads = torch.autograd.grad(
            list(outputs.values()), list(inputs.values()), weights, allow_unused=True
        )
        return (
            {k: x.detach() for k, x in outputs.items()},
            {
                k: torch.zeros_like(x) if g is None else g
                for (k, x), g in zip(inputs.items(), grads, strict=True)
            },
        )


def assert_same(actual, expected, tolerance: float = 1e-9) -> None:  # type: ignore[no-untyped-def]
    """Every named tensor within `tolerance` of the other, relative to its largest number."""
    for found, wanted in zip(actual, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert torch.isfinite(found[name]).all(), name
            error = (found[name] - x).abs().max() / x.abs().max().clamp_min(1)
            assert error < tolerance, f"{name}: {error:.1e}"
