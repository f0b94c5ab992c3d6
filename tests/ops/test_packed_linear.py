"""Packed products give what plain ones give, with and without the operators."""

import pytest
import torch
import torch.nn.functional as F
from problems import Problem, assert_same

from groundlm.ops import packed_linear
from groundlm.ops.fused import ScanSettings, fused_scan
from groundlm.ops.packed_linear import PackedLinear


@pytest.mark.parametrize("small", [0, 1 << 30])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("transposed", [True, False])
def test_same_product(monkeypatch, small, pack, biased, batch, transposed):
    monkeypatch.setattr(packed_linear, "SMALL_WEIGHT", small)
    torch.manual_seed(0)
    weight = torch.randn(7, 13).T if transposed else torch.randn(13, 7)
    bias = torch.randn(13) if biased else None
    x = torch.randn(batch, 7)
    product = PackedLinear(weight, batch, bias, torch.float32, pack)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product(x).double(), expected, rtol=1e-5, atol=1e-5)
    if not pack:
        assert product.kernel == "plain"


def test_the_operators_exist_here():
    """So that the tests above do test them; both are part of torch's CPU builds for x86."""
    assert packed_linear.has_mkldnn()
    product = PackedLinear(torch.randn(4, 4), 2)
    assert product.kernel in ("mkl", "mkldnn")


def test_only_float32_is_packed():
    for dtype in (torch.float64, torch.bfloat16):
        assert PackedLinear(torch.randn(4, 4).to(dtype), 2).kernel == "plain"


def test_bf16_matrix_between_float32_vectors():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(3, 4)
    y = PackedLinear(weight.bfloat16(), 3, bias, torch.float32)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("missing", [("has_mkl",), ("has_mkl", "has_mkldnn")])
def test_scan_without_the_operators(monkeypatch, missing):
    sizes = {"batch": 3, "time": 20, "state": 32, "ffn": 40, "key": 8, "value": 16}
    problem = Problem(dtype=torch.float32, **sizes)
    packed = problem.run(fused_scan)
    assert_same(problem.run(fused_scan, settings=ScanSettings(pack=False)), packed, 1e-4)
    for name in missing:
        monkeypatch.setattr(packed_linear, name, lambda: False)
    kernels = {PackedLinear(torch.randn(4, 4), 2).kernel}
    assert kernels == ({"plain"} if len(missing) == 2 else {"mkldnn"})
    assert_same(problem.run(fused_scan), packed, 1e-4)
