"""Packed products give what plain ones give, with and without the operators."""

import pytest
import torch
import torch.nn.functional as F
from problems import Problem, assert_same

from groundlm.model import products, row_product
from groundlm.model.products import product
from groundlm.ops import packed_linear
from groundlm.ops.fused import ScanSettings, fused_scan
from groundlm.ops.packed_linear import PackedLinear


@pytest.fixture(params=[True, False], ids=["intel", "other"])
def intel(request, monkeypatch):
    """Both makers' choices, whatever this processor is."""
    monkeypatch.setattr(products, "made_by_intel", lambda: request.param)
    return request.param


@pytest.mark.parametrize("small", [0, 1 << 30])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("transposed", [True, False])
def test_same_product(monkeypatch, intel, small, pack, biased, batch, transposed):
    monkeypatch.setattr(packed_linear, "SMALL_WEIGHT", small)
    torch.manual_seed(0)
    weight = torch.randn(7, 13).T if transposed else torch.randn(13, 7)
    bias = torch.randn(13) if biased else None
    x = torch.randn(batch, 7)
    linear = PackedLinear(weight, batch, bias, torch.float32, pack)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    if not pack:
        assert linear.kernel == "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (7, 5, 3), (1, 1, 1), (4, 9, 4)])
@pytest.mark.parametrize("small", [0, 1 << 30])
def test_product_of_any_strides(monkeypatch, intel, dtype, sizes, small):
    monkeypatch.setattr(products, "SMALL_RESULT", small)
    torch.manual_seed(0)
    m, k, n = sizes
    a, a_t = torch.randn(m, k).to(dtype), torch.randn(k, m).to(dtype).T
    b, b_t = torch.randn(k, n).to(dtype), torch.randn(n, k).to(dtype).T
    sliced = torch.randn(m, 2 * k).to(dtype)[:, :k]
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
    for left in (a, a_t, sliced):
        for right in (b, b_t):
            found, wanted = product(left, right), left.double() @ right.double()
            assert found.dtype == dtype
            bound = bounds[dtype]
            torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


def test_the_operators_exist_here():
    """So that the tests above do test them; both are part of torch's CPU builds for x86."""
    assert products.has_mkldnn()
    linear = PackedLinear(torch.randn(4, 4), 2)
    assert linear.kernel in ("mkl", "mkldnn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_single_rows_are_not_packed(monkeypatch, dtype, transposed, biased):
    monkeypatch.setattr(products, "made_by_intel", lambda: False)
    row_product._function.cache_clear()
    monkeypatch.setattr(row_product, "SMALLEST", {dtype: 1})
    torch.manual_seed(0)
    weight = (torch.randn(37, 53).T if transposed else torch.randn(53, 37)).to(dtype)
    bias = torch.randn(53) if biased else None
    linear = PackedLinear(weight, 1, bias, torch.float32)
    assert linear.kernel == "row"
    x = torch.randn(1, 37)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x.double()).double(), expected, rtol=1e-5, atol=1e-5)
    assert PackedLinear(weight, 2, bias, torch.float32).kernel != "row"
    row_product._function.cache_clear()


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
        monkeypatch.setattr(products, name, lambda: False)
    kernels = {PackedLinear(torch.randn(4, 4), 2).kernel}
    assert kernels == ({"plain"} if len(missing) == 2 else {"mkldnn"})
    assert_same(problem.run(fused_scan), packed, 1e-4)
