"""Matrix products by the fastest library that torch carries for this processor.

torch's own CPU products run on MKL, which uses half the width of other makers' vector units. There
oneDNN is taken for large float32 products. The choice depends on the processor and on sizes alone,
never on a timing, so that a run repeats to the bit.
"""

from functools import cache

import torch
from torch import Tensor

SMALL_RESULT = 1 << 24
"""Elements up to which a strided result is cheaper than the kernel's slower orientation."""


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
