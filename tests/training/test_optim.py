"""Parameter groups, schedule and clipping."""

import math

import pytest
import torch

from groundlm.training.config import OptimizerConfig
from groundlm.training.optim import apply_step, build_optimizer, learning_rate, parameter_groups


def test_every_parameter_is_in_exactly_one_group(tiny):
    model = tiny(num_layers=2, decoder_bias=True)
    grouped = [id(p) for g in parameter_groups(model, 0.1) for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_only_matrices_decay(tiny):
    model = tiny(decoder_bias=True)
    names = {id(p): name for name, p in model.named_parameters()}
    decays, stays = (
        {names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.1)
    )
    assert "model.embedding.weight" in decays
    assert {n for n in decays if "norm" in n or "bias" in n or "A_log" in n} == set()
    assert {"model.memory.A_log", "model.memory.dt_bias", "model.decode.bias"} <= stays
    assert parameter_groups(model, 0.1)[0]["weight_decay"] == 0.1
    assert parameter_groups(model, 0.1)[1]["weight_decay"] == 0


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


def test_apply_step_clips_to_the_norm_and_reports_it(tiny):
    model = tiny()
    config = OptimizerConfig(weight_decay=0.0)
    optimizer = build_optimizer(model, config)
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in parameters)
    before = [p.detach().clone() for p in parameters]
    norm = apply_step(optimizer, parameters, rate=0.5, clip_norm=1.0)
    assert norm == pytest.approx(2 * math.sqrt(count))
    moment = optimizer.state[parameters[0]]["exp_avg"]
    clipped = 2.0 / norm
    torch.testing.assert_close(moment, torch.full_like(moment, clipped * (1 - config.beta1)))
    # Adam's first step has the size of the learning rate whatever the gradient's scale.
    torch.testing.assert_close(parameters[0], before[0] - 0.5, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in parameters)
