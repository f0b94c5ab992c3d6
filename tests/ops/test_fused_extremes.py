"""Decays, strengths and keys at their ends, against the float64 loop (cases C10, C11, C22)."""

import math

import pytest
import torch
from problems import Problem, assert_same

from groundlm.model import cell
from groundlm.ops.fused import ScanSettings, fused_scan
from groundlm.ops.reference import reference_scan


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def compiled(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def extreme(
    log_decay: float | None = None, strength: int | None = None, equal_keys: bool = False, **sizes
) -> Problem:
    """A problem whose log-decay and write strength are (nearly) constant; None leaves them."""
    problem = Problem(**sizes)
    memory = problem.params.memory
    with torch.no_grad():
        if log_decay is not None:
            memory.decay_HD.zero_()
            memory.dt_bias_H.zero_()
            memory.A_log_H.fill_(math.log(max(-log_decay / math.log(2), 1e-320)))
        if strength is not None:
            # The first number of every grounded state is large, so this weight decides.
            problem.token_BTD[..., 0] = 50
            memory.beta_HD.zero_()
            memory.beta_HD[:, 0] = 1e4 if strength else -1e4
        if equal_keys:
            memory.key_XD.zero_()
            memory.key_bias_X.fill_(0.3)
    return problem


@pytest.mark.parametrize("log_decay", [0, -1e-8, -30, -90, -1e4])
@pytest.mark.parametrize("strength", [0, 1, None])
def test_constant_decay_and_strength(log_decay, strength):
    problem = extreme(log_decay, strength, time=19, layers=2)
    settings = ScanSettings(chunk_tokens=8)
    fused = problem.run(fused_scan, settings=settings)
    assert_same(fused, problem.run(reference_scan))


@pytest.mark.parametrize("log_decay", [0, -1e-8, None])
def test_equal_keys_200_times(log_decay):
    problem = extreme(log_decay, 1, equal_keys=True, time=200)
    assert_same(problem.run(fused_scan), problem.run(reference_scan))


def test_values_of_norm_1000():
    problem = extreme(-1e-3, 1, time=40)
    with torch.no_grad():
        problem.params.memory.value_YD.mul_(1e3)
    outputs, grads = problem.run(fused_scan)
    expected, expected_grads = problem.run(reference_scan)
    assert_same([outputs, grads], [expected, expected_grads])


def test_full_strength_without_decay_gives_the_value_back():
    problem = extreme(0, 1, equal_keys=True, time=12)
    _, (_, grounded, memory) = fused_scan(problem.token_BTD, problem.params, problem.carry)
    shorter = fused_scan(problem.token_BTD[:, :-1], problem.params, problem.carry)[1]
    written = cell.write_vectors(shorter[1], grounded, problem.params.memory, 1e-6)
    recalled = cell.recall(memory, written.key_BHK)
    torch.testing.assert_close(recalled, written.value_BHV, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", [("key",), ("query",), ("key", "query")])
def test_keys_and_queries_of_zero(parts):
    problem = Problem(time=9)
    with torch.no_grad():
        if "key" in parts:
            problem.params.memory.key_bias_X.fill_(-100)
        if "query" in parts:
            problem.params.predict[0].read.query_bias_X.fill_(-100)
    fused = problem.run(fused_scan)
    assert_same(fused, problem.run(reference_scan))
    assert all(x.abs().max() < 1e4 for x in fused[1].values())


@pytest.mark.parametrize(
    ("batch", "heads", "size", "time"),
    [
        (1, 1, 1, 1), (3, 3, 3, 2), (1, 3, 24, 63), (3, 1, 33, 64), (1, 1, 48, 65),
        (3, 3, 80, 65), (1, 3, 100, 130), (3, 1, 100, 64), (3, 3, 1, 130),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first_state", [False, True])
def test_float32_fast_and_reference(batch, heads, size, time, first_state):
    """C10: outputs, last state and every gradient within 1e-4 of the float64 reference."""
    sizes = {"batch": batch, "heads": heads, "key": size, "value": size, "time": time}
    results = []
    for scan, dtype in ((fused_scan, torch.float32), (reference_scan, torch.float64)):
        problem = Problem(state=16, ffn=24, dtype=dtype, **sizes)
        if not first_state:
            with torch.no_grad():
                for x in problem.carry:
                    x.zero_()
        results.append(problem.run(scan))
    for found, wanted in zip(*results, strict=True):
        # Where terms cancel (a key of width 1 has no gradient), rounding is all that is left.
        floor = 1e-2 * max(float(x.norm()) for x in wanted.values())
        for name, x in wanted.items():
            error = (found[name] - x).norm() / max(float(x.norm()), floor)
            assert error < 1e-4, f"{name}: {error:.1e}"
