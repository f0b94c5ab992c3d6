"""The sliced loss against `F.cross_entropy`, float64."""

import sys

import pytest
import torch
import torch.nn.functional as F

from groundlm import UserError
from groundlm.ops import linear_cross_entropy
from groundlm.ops.linear_cross_entropy import shift_targets

# The package's attribute of this name is the function, so the module is found by its full name.
MODULE = sys.modules["groundlm.ops.linear_cross_entropy"]


def problem(rows: int, ignored: float = 0.0, vocabulary: int = 13, width: int = 5):
    torch.manual_seed(rows)
    hidden = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[torch.rand(rows) < ignored] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("slice_logits", [1, 13 * 3, 1 << 22])
def test_value_and_gradients(monkeypatch, rows, ignored, slice_logits):
    monkeypatch.setattr(MODULE, "SLICE_LOGITS", slice_logits)
    hidden, weight, targets = problem(rows, ignored)
    total = linear_cross_entropy(hidden, weight, targets)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(3 * total, [hidden, weight])
    wanted = torch.autograd.grad(3 * expected, [hidden, weight])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_labels_out_of_range():
    hidden, weight, targets = problem(6)
    for bad in (13, -1):
        targets[3] = bad
        with pytest.raises(UserError, match=f"label {bad} is outside the vocabulary of 13"):
            linear_cross_entropy(hidden, weight, targets)


def test_extreme_logits_stay_finite():
    hidden, weight, targets = problem(6)
    total = linear_cross_entropy(1e4 * hidden, weight, targets)
    assert torch.isfinite(total)
    for grad in torch.autograd.grad(total, [hidden, weight]):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_one_input_needs_a_gradient(needs):
    hidden, weight, targets = problem(5)
    hidden.requires_grad_(needs[0])
    weight.requires_grad_(needs[1])
    total = linear_cross_entropy(hidden, weight, targets)
    assert total.requires_grad == any(needs)
    if any(needs):
        total.backward()
    assert (hidden.grad is not None, weight.grad is not None) == needs


def test_no_more_logits_than_the_slice(monkeypatch):
    monkeypatch.setattr(MODULE, "SLICE_LOGITS", 39)
    largest = 0
    original = MODULE.product

    def noting(a, b):
        nonlocal largest
        out = original(a, b)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(MODULE, "product", noting)
    # Detached: the gradient of the weight is as large as the weight.
    linear_cross_entropy(*(x.detach() for x in problem(40)))
    assert largest == 39


def test_bf16_weight_and_autocast_stay_near():
    hidden, weight, targets = problem(30)
    exact = linear_cross_entropy(hidden, weight, targets).item()
    low = linear_cross_entropy(hidden.float(), weight.bfloat16(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_cross_entropy(hidden.float(), weight.float(), targets)
    for total in (low, cast):
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(exact, rel=1e-2)


def test_shift():
    labels = torch.tensor([[5, 6, 7]])
    assert shift_targets(labels).tolist() == [[6, 7, -100]]
