"""The fused scan against the reference loop: float64, every output and every gradient."""

import dataclasses

import pytest
import torch
from problems import Problem, assert_same
from torch import Tensor

from groundlm.ops import native, stages
from groundlm.ops.fused import ScanSettings, fused_scan
from groundlm.ops.reference import reference_scan

CHUNK = ScanSettings(chunk_tokens=4)


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def compiled(request, monkeypatch):
    """Every test with and without compiled code between the products."""
    if request.param == "plain":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    else:
        assert native.available(stages.sizes_of(Problem().params, Problem().carry[0]))


def compare(problem: Problem, settings: ScanSettings = CHUNK, tolerance: float = 1e-9) -> None:
    fused = problem.run(fused_scan, settings=settings)
    assert_same(fused, problem.run(reference_scan), tolerance)


@pytest.mark.parametrize("time", [1, 2, 3, 4, 5, 14])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_lengths_layers_heads(time, layers, heads):
    compare(Problem(time=time, layers=layers, heads=heads))


@pytest.mark.parametrize("size", [1, 3, 5, 24, 33, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_sizes(size, batch):
    sizes = {"state": size, "ffn": size + 1, "key": size, "value": size}
    compare(Problem(batch=batch, time=18, heads=2, layers=2, **sizes), ScanSettings())


@pytest.mark.parametrize("time", [15, 16, 17, 50])
def test_lengths_about_the_chunk_that_the_sizes_choose(time):
    compare(Problem(time=time), ScanSettings())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize(("resets", "mask"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_boundaries_and_padding(seed, heads, resets, mask, budget):
    problem = Problem(batch=3, time=13, layers=2, heads=heads, seed=seed, resets=resets, mask=mask)
    compare(problem, dataclasses.replace(CHUNK, memory_budget_bytes=budget))


def test_a_row_of_padding_and_a_reset_at_every_token():
    problem = Problem(batch=3, time=9, resets=True, mask=True)
    problem.mask_BT[1] = False
    problem.resets_BT[2] = True
    compare(problem)


def test_strided_and_expanded_inputs_and_upstream_gradients():
    problem = Problem(batch=3, time=6)
    wide = problem.randn(6, 3, 10, scale=1)
    problem.token_BTD = wide.transpose(0, 1)[..., ::2]
    start = problem.randn(5, scale=1)
    problem.carry = (start.expand(3, 5), start.expand(3, 5), problem.carry[2].mT.contiguous().mT)
    results = []
    for scan in (fused_scan, reference_scan):
        out, carry = scan(problem.token_BTD, problem.params, problem.carry)
        loss = out[:, ::2].sum() + out.mean(1).square().sum() + sum(x.sum() for x in carry)
        grads = torch.autograd.grad(loss, [wide, start, *problem.inputs().values()])
        results.append([{"out": out}, {str(i): g for i, g in enumerate(grads)}])
    assert_same(*results)


def test_some_inputs_without_gradient():
    problem = Problem()
    expected = problem.run(reference_scan)
    kept = [name for i, name in enumerate(problem.inputs()) if i % 3 == 0]
    for name, x in problem.inputs().items():
        x.requires_grad_(name in kept)
    out, carry = fused_scan(problem.token_BTD, problem.params, problem.carry, settings=CHUNK)
    torch.manual_seed(0)
    upstream = torch.Generator().manual_seed(1)
    outputs = [out, *carry]
    weights = [torch.randn(x.shape, generator=upstream, dtype=torch.float64) for x in outputs]
    torch.autograd.backward(outputs, weights)
    for name, x in problem.inputs().items():
        if name in kept:
            torch.testing.assert_close(x.grad, expected[1][name], rtol=1e-9, atol=1e-9)
        else:
            assert x.grad is None


def test_only_the_start_state_needs_a_gradient():
    problem = Problem(resets=True)
    expected = problem.run(reference_scan)[1]
    for name, x in problem.inputs().items():
        x.requires_grad_(name == "memory")
    memory = problem.carry[2]
    assert memory is not None
    out, carry = fused_scan(problem.token_BTD, problem.params, problem.carry, problem.resets_BT)
    upstream = torch.Generator().manual_seed(1)
    outputs = [out, *carry]
    torch.autograd.backward(
        outputs, [torch.randn(x.shape, generator=upstream, dtype=torch.float64) for x in outputs]
    )
    torch.testing.assert_close(memory.grad, expected["memory"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("heads", [0, 2])
def test_without_gradients_the_same_bits(mode, heads):
    problem = Problem(batch=3, time=14, layers=2, heads=heads, resets=True, mask=True)
    args = (problem.token_BTD, problem.params, problem.carry, problem.resets_BT, problem.mask_BT)
    expected, state = fused_scan(*args, settings=CHUNK)
    with mode():
        found, after = fused_scan(*args, settings=CHUNK)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    for a, b in zip(after, state, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("budget", [1, 40_000])
def test_segments_change_no_bit_of_the_outputs(budget):
    problem = Problem(batch=3, time=27, layers=2)
    outputs, grads = problem.run(fused_scan, settings=CHUNK)
    cut = dataclasses.replace(CHUNK, memory_budget_bytes=budget)
    cut_outputs, cut_grads = problem.run(fused_scan, settings=cut)
    for name, x in outputs.items():
        assert torch.equal(x, cut_outputs[name]), name
    assert_same([cut_grads], [grads], 1e-12)


def test_backward_twice():
    problem = Problem(time=9)
    out, _ = fused_scan(problem.token_BTD, problem.params, problem.carry, settings=CHUNK)
    inputs = list(problem.inputs().values())
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_double_backward_is_refused():
    problem = Problem()
    out, _ = fused_scan(problem.token_BTD, problem.params, problem.carry)
    (grad,) = torch.autograd.grad(out.square().sum(), problem.token_BTD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradcheck():
    problem = Problem(batch=1, time=3, state=3, ffn=2, heads=1, key=2, value=2)
    inputs = problem.inputs()
    chosen = [inputs[k] for k in ("token", "predicted", "grounded", "memory")]

    def scan(*given: Tensor) -> tuple[Tensor, ...]:
        out, carry = fused_scan(given[0], problem.params, given[1:], settings=CHUNK)
        return (out, *carry)

    assert torch.autograd.gradcheck(scan, chosen)


@pytest.mark.parametrize("heads", [0, 2])
def test_float32(heads):
    sizes = {"batch": 3, "time": 40, "layers": 2, "heads": heads}
    sizes |= {"key": 16, "value": 32, "state": 48, "ffn": 64}
    single = Problem(dtype=torch.float32, **sizes).run(fused_scan)
    assert_same(single, Problem(**sizes).run(reference_scan), 2e-4)
