"""A matrix that is used many times: packed once into the layout its CPU kernel wants.

A window multiplies the same matrices once per token. On the CPU in float32 the vendor kernels
reorder the matrix on every call unless they are handed a packed copy; one row alone meets the
matrix as it is, in `model.row_product`. Everywhere else, and where the operators are missing, this
is a plain product with the same result up to rounding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from groundlm.model import products, row_product

SMALL_WEIGHT = 1 << 22
"""Elements below which MKL's packed call, the one with less overhead per call, is taken."""


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
        if not pack or weight_NK.device.type != "cpu" or self._takes_rows(weight_NK):
            return
        if weight_NK.dtype == torch.float32:
            self._pack(weight_NK)

    def _takes_rows(self, weight_NK: Tensor) -> bool:
        """Whether single rows go to `row_product`, which reads the matrix without packing."""
        x_1K = torch.empty(1, weight_NK.shape[1], dtype=self.out_dtype)
        if self.batch_size != 1 or not row_product.applies(x_1K, weight_NK.contiguous()):
            return False
        self.weight_NK, self.kernel = weight_NK.contiguous(), "row"
        return True

    def _pack(self, weight_NK: Tensor) -> None:
        if (
            weight_NK.numel() < SMALL_WEIGHT
            and products.has_mkl()
            and not products.prefers_onednn()
        ):
            dense = weight_NK.contiguous()
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(dense, self.batch_size)
            self.weight_NK, self.kernel = dense, "mkl"
        elif products.has_mkldnn():
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
        if self.kernel == "row":
            y = row_product.row_product(x.to(self.out_dtype), self.weight_NK)
            return y if self.bias_N is None else y.add_(self.bias_N)
        if self.dtype == self.out_dtype:
            return F.linear(x, self.weight_NK, self.bias_N)
        y = F.linear(x.to(self.dtype), self.weight_NK).to(self.out_dtype)
        return y if self.bias_N is None else y.add_(self.bias_N)
