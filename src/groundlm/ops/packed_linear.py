"""Matrix products by the fastest library that torch carries for this processor.

A window multiplies the same matrices once per token. On the CPU in float32 the vendor kernels
reorder the matrix on every call unless they are handed a packed copy; everywhere else, and where
the operators are missing, this is a plain product with the same result up to rounding.

torch's own CPU products run on MKL, which uses half the width of other makers' vector units. There
oneDNN is taken for every product. The choice depends on the processor alone, never on a timing, so
that a run repeats to the bit.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_WEIGHT = 1 << 22
"""Elements below which MKL's packed call, the one with less overhead per call, is taken."""
SMALL_RESULT = 1 << 24
"""Elements up to which a strided result is cheaper than the kernel's slower orientation."""


class PackedLinear:
    """`y = x @ weight.T (+ bias)` for many x of one batch size; y in `out_dtype`.

    Args:
        weight_NK: matrix [N, K] in the dtype that products run in.
        batch_size: rows of every x to come.
        bias_N: added in `out_dtype`, after the product.
        out_dtype: dtype of y, that of the state.
        pack: False keeps the plain product.
    """

    def __init__(
        self,
        weight_NK: Tensor,
        batch_size: int,
        bias_N: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        pack: bool = True,
    ) -> None:
        self.dtype = weight_NK.dtype
        self.out_dtype = out_dtype or weight_NK.dtype
        self.bias_N = bias_N
        self.batch_size = batch_size
        self.weight_NK: Tensor | None = weight_NK
        self.kernel = "plain"
        self.packed: Tensor | None = None
        if pack and weight_NK.device.type == "cpu" and weight_NK.dtype == torch.float32:
            self._pack(weight_NK)

    def _pack(self, weight_NK: Tensor) -> None:
        if weight_NK.numel() < SMALL_WEIGHT and has_mkl() and not prefers_onednn():
            dense = weight_NK.contiguous()
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(dense, self.batch_size)
            self.weight_NK, self.kernel = dense, "mkl"
        elif has_mkldnn():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, self.batch_size)
            self.weight_NK, self.kernel = None, "mkldnn"

    def __call__(self, x: Tensor) -> Tensor:
        """The product for x [batch_size, K] in any float dtype: [batch_size, N]."""
        if self.kernel == "mkl":
            return torch.ops.mkl._mkl_linear.default(
                x, self.packed, self.weight_NK, self.bias_N, self.batch_size
            )
        if self.kernel == "mkldnn":
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self.packed, self.bias_N, "none", [], ""
            )
        assert self.weight_NK is not None
        if self.dtype == self.out_dtype:
            return F.linear(x, self.weight_NK, self.bias_N)
        y = F.linear(x.to(self.dtype), self.weight_NK).to(self.out_dtype)
        return y if self.bias_N is None else y.add_(self.bias_N)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """`a @ b` [M, N] for operands of one dtype, any strides; the result may be strided too."""
    floats = a_MK.dtype == torch.float32 and a_MK.device.type == "cpu"
    if not (floats and prefers_onednn()):
        return a_MK @ b_KN
    rows, columns = a_MK.shape[0], b_KN.shape[1]
    if columns < rows and rows * columns <= SMALL_RESULT:  # the kernel likes few rows
        return _onednn(b_KN.T, a_MK).T
    return _onednn(a_MK, b_KN.T)


def _onednn(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x_MK, weight_NK, None, "none", [], "")


def prefers_onednn() -> bool:
    """Whether oneDNN beats MKL on this processor: on all that are not Intel's."""
    return has_mkldnn() and not made_by_intel()


@cache
def made_by_intel() -> bool:
    """Whether the processor is Intel's, or torch cannot tell."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "Intel" in str(capabilities.get("cpu_name", "Intel"))


def has_mkl() -> bool:
    """Whether this build of torch carries MKL's packed linear."""
    return torch.backends.mkl.is_available() and _has_op("mkl", "_mkl_linear")


def has_mkldnn() -> bool:
    """Whether this build of torch carries oneDNN's packed linear."""
    return torch.backends.mkldnn.is_available() and _has_op("mkldnn", "_linear_pointwise")


def _has_op(space: str, name: str) -> bool:
    return hasattr(getattr(torch.ops, space), name)
