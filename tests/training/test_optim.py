"""Parameter groups, schedule and clipping."""

import math

import pytest
import torch

from groundlm import UserError
from groundlm.training.config import OptimizerConfig
from groundlm.training.optim import Optimizers, WeightAverage, learning_rate


def grouped(optimizers: Optimizers) -> list[int]:
    return [p.data_ptr() for g in optimizers.groups for p in g["params"]]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_in_exactly_one_group(tiny, name):
    model = tiny(num_layers=2, decoder_bias=True)
    optimizers = Optimizers(model, OptimizerConfig(name=name))
    numbers = sum(p.numel() for g in optimizers.groups for p in g["params"])
    assert numbers == sum(p.numel() for p in model.parameters())
    assert len(set(grouped(optimizers))) == len(grouped(optimizers))


def test_only_matrices_decay(tiny):
    model = tiny(decoder_bias=True)
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    decays, stays = Optimizers(model, OptimizerConfig(weight_decay=0.1)).groups
    assert (decays["weight_decay"], stays["weight_decay"]) == (0.1, 0.0)
    decayed = {names[p.data_ptr()] for p in decays["params"]}
    stayed = {names[p.data_ptr()] for p in stays["params"]}
    assert "model.embedding.weight" in decayed
    assert {n for n in decayed if "norm" in n or "bias" in n or "A_log" in n} == set()
    assert {"model.memory.A_log", "model.memory.dt_bias", "model.decode.bias"} <= stayed


def test_muon_takes_each_logical_matrix_and_leaves_the_embedding(tiny):
    model = tiny()
    optimizers = Optimizers(model, OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=0))
    assert "model.embedding.weight" not in optimizers.matrices
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    up = model.model.predict[0].ffn.up.weight
    halves = [g.clone() for g in up.grad.chunk(2)]
    before = up.detach().clone()
    optimizers.step(0.01)
    for half, start, grad in zip(up.detach().chunk(2), before.chunk(2), halves, strict=True):
        alone = torch.nn.Parameter(start.clone())
        alone.grad = grad
        torch.optim.Muon([alone], lr=0.01, weight_decay=0.0, momentum=0.95,
                         adjust_lr_fn="match_rms_adamw").step()  # fmt: skip
        torch.testing.assert_close(half, alone.detach())
        # Close to orthogonal, and of AdamW's size: root mean square 0.2 per unit of rate.
        rms = (half - start).square().mean().sqrt()
        assert 0.1 * 0.01 < rms < 0.3 * 0.01


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),
        (3, 1.0),
        (4, 1.0),
        (7, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 3 / 5))),
        (9, 0.1),
    ],
)
def test_schedule_rises_to_the_peak_and_falls_to_the_floor(step, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    assert learning_rate(step, 10, config) == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 10), (5, 5), (20, 5), (4, 5)])
def test_schedule_is_defined_at_its_edges(warmup, steps):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup)
    rates = [learning_rate(s, steps, config) for s in range(steps)]
    assert all(0 < r <= 1 for r in rates)
    assert rates == sorted(rates) or warmup < steps


@pytest.mark.parametrize(("step", "expected"), [(0, 0.5), (1, 1.0), (2, 1.0), (6, 0.5), (9, 1 / 8)])
def test_linear_schedule_ends_at_zero(step, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear_to_zero")
    assert learning_rate(step, 10, config) == pytest.approx(expected)


def test_step_clips_to_the_norm_and_reports_it(tiny):
    model = tiny()
    config = OptimizerConfig(weight_decay=0.0, clip_norm=1.0)
    optimizers = Optimizers(model, config)
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in parameters)
    before = [p.detach().clone() for p in parameters]
    norm = optimizers.step(0.5)
    assert norm == pytest.approx(2 * math.sqrt(count))
    moment = optimizers.tensors()["model.embedding.weight.exp_avg"]
    torch.testing.assert_close(moment, torch.full_like(moment, 2 / norm * (1 - config.beta1)))
    # Adam's first step has the size of the learning rate whatever the gradient's scale.
    torch.testing.assert_close(parameters[0], before[0] - 0.5, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_changes_nothing(tiny, name, bad):
    model = tiny()
    optimizers = Optimizers(model, OptimizerConfig(name=name))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    next(model.parameters()).grad[0, 0] = bad
    assert not math.isfinite(optimizers.step(0.1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizers.tensors() == {}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_survive_the_way_through_tensors(tiny, name):
    config = OptimizerConfig(name=name, warmup_steps=0)
    first, second = tiny(), tiny()
    a, b = Optimizers(first, config), Optimizers(second, config)

    def step(model, optimizers):
        model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
        optimizers.step(0.01)

    step(first, a)
    second.load_state_dict(first.state_dict())
    b.load_tensors(a.tensors(), "here")
    step(first, a)
    step(second, b)
    for x, y in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(x, y)
    broken = a.tensors()
    key = next(iter(broken))
    del broken[key]
    with pytest.raises(UserError, match=f"here: {key.replace('.', '[.]')} is missing"):
        b.load_tensors(broken, "here")


def test_weight_average_is_the_recurrence_and_goes_on_and_off(tiny):
    model = tiny(dtype=torch.float32)
    average = WeightAverage(model, 0.9)
    p = model.model.embedding.weight
    expected = p.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            p.add_(1.0)
        average.update()
        expected = 0.9 * expected + 0.1 * p.detach()
    kept = p.detach().clone()
    with average.applied():
        torch.testing.assert_close(p.detach(), expected)
    assert torch.equal(p.detach(), kept)
