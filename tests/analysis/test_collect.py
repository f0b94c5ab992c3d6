"""One pass keeps what a model computes, changes none of it, and stays within bounds."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from groundlm.analysis.collect import collect, sample_windows
from groundlm.analysis.default_token import decoded
from groundlm.analysis.horizons import memory_horizons, retention
from groundlm.analysis.lens import look
from groundlm.analysis.taps import listening
from groundlm.errors import UserError
from groundlm.evaluation.reading import TokenList
from groundlm.models import build_model
from helpers import ONE_THREAD

IDS = torch.randint(1, 61, (5, 13), generator=torch.Generator().manual_seed(2)).numpy()


def test_collected_values_are_the_models_own(tiny):
    model = tiny(num_layers=2)
    seen = {}
    with torch.no_grad(), listening(model, "*", lambda at, x: seen.setdefault(at, []).append(x)):
        out = model.model(torch.from_numpy(IDS))
    found = collect(model, IDS, batch_size=2)
    np.testing.assert_allclose(found.states_NTD, out.last_hidden_state, atol=1e-5)
    for mine, place in ((found.log_decay_NTH, "write.log_decay"), (found.beta_NTH, "write.beta")):
        np.testing.assert_allclose(mine, torch.stack(seen[place], 1), atol=1e-6, rtol=1e-5)
    assert list(found.openness_NT) == ["ground.gate", "predict.0.gate", "predict.1.gate"]
    gate = torch.stack(seen["predict.1.gate"], 1).mean(-1)
    np.testing.assert_allclose(found.openness_NT["predict.1.gate"], gate, atol=1e-6)
    kinds = ["carried", "ffn", "read"]
    assert list(found.norms_NT) == [f"{i}.{kind}" for i in (0, 1) for kind in kinds]
    carried = torch.stack(seen["predict.1.rest"], 1) - torch.stack(seen["predict.1.ffn"], 1)
    np.testing.assert_allclose(found.norms_NT["1.carried"], carried.norm(dim=-1), rtol=1e-5)


def test_collecting_changes_no_logit_and_batches_do_not_matter(tiny):
    model = tiny()
    with torch.no_grad():
        before = model(torch.from_numpy(IDS)).logits
    one, many = collect(model, IDS, 1), collect(model, IDS, 8)
    with torch.no_grad():
        assert torch.equal(model(torch.from_numpy(IDS)).logits, before)
    np.testing.assert_allclose(one.states_NTD, many.states_NTD, atol=1e-6)
    assert model.model.tap is None


def test_no_memory_no_memory_figures(tiny):
    found = collect(tiny(num_heads=0), IDS)
    assert found.log_decay_NTH is None
    assert found.beta_NTH is None
    assert list(found.norms_NT) == ["0.carried", "0.ffn"]


def test_gated_delta_net_decays_are_those_of_its_kernel(monkeypatch):
    sizes = {"model_type": "gated_delta_net", "vocab_size": 61, "hidden_size": 16,
             "intermediate_size": 24, "num_hidden_layers": 1, "linear_num_key_heads": 2,
             "linear_num_value_heads": 2, "linear_key_head_dim": 4,
             "linear_value_head_dim": 4}  # fmt: skip
    model = build_model(sizes, 0).eval()
    kernel, given = modeling_qwen3_next.torch_chunk_gated_delta_rule, {}

    def spy(*args, **kwargs):
        given.update(kwargs)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", spy)
    found = collect(model, IDS, batch_size=5)
    np.testing.assert_allclose(found.log_decay_NTH, given["g"], rtol=1e-5)
    np.testing.assert_allclose(found.beta_NTH, given["beta"], rtol=1e-5)
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(IDS)).last_hidden_state
        normed = model.model.norm(torch.from_numpy(found.states_NTD))
        logits = model(torch.from_numpy(IDS)).logits[1, 3]
    torch.testing.assert_close(normed, hidden)  # states are what stands before the norm
    np.testing.assert_allclose(decoded(model, found.states_NTD[1, 3]), logits, atol=1e-5)


def test_states_that_are_not_finite_are_refused(tiny):
    model = tiny()
    with torch.no_grad():
        model.model.embedding.weight[int(IDS[2, 11])] = torch.nan
    with pytest.raises(UserError, match=r"\d+ of 65 states are not finite"):
        collect(model, IDS, batch_size=5)


def test_values_beside_the_states_that_are_not_finite_are_refused(tiny):
    model = tiny()
    with torch.no_grad():
        model.model.memory.beta.weight[:] = torch.inf  # inf - inf; reads are numbers still
        model.model.predict[0].read.out.weight[:] = 0
    with pytest.raises(UserError, match="not finite"):
        collect(model, IDS)


def test_a_head_that_forgets_everything_is_no_fault(tiny):
    model = tiny()
    with torch.no_grad():
        model.model.memory.A_log[1] = 90.0
    found = collect(model.float(), IDS)
    assert np.isneginf(found.log_decay_NTH[..., 1]).any()
    curves = retention(found.log_decay_NTH)
    assert np.isfinite(curves["retention"]).all()
    assert curves["retention"][1][0] == pytest.approx(0, abs=1e-6)
    assert memory_horizons(curves)["horizon_tokens"][1] < 1


def test_norms_beyond_the_squares_of_float32(tiny):
    model = tiny().float()
    with torch.no_grad():
        model.model.ground.token_proj.weight.mul_(1e22)
    assert all(np.isfinite(x).all() for x in collect(model, IDS).norms_NT.values())


@pytest.mark.parametrize(
    ("tokens", "states", "window", "shape"),
    [(100, 64, 16, (4, 16)), (20, 64, 16, (1, 16)), (5, 64, 16, (1, 5)), (1, 64, 16, (1, 1)),
     (100, 8, 16, (1, 8)), (1000, 64, 10, (6, 10))],
)  # fmt: skip
def test_sampled_windows_are_spread_and_do_not_overlap(tokens, states, window, shape):
    ids = sample_windows(TokenList(np.arange(tokens)), states, window)
    assert ids.shape == shape
    assert len(np.unique(ids)) == ids.size
    assert (np.diff(ids, axis=1) == 1).all()
    if shape[0] > 1:
        assert ids[-1, -1] >= tokens - tokens // shape[0]


def test_sample_of_nothing_is_refused():
    with pytest.raises(UserError, match="0 states in windows of 4 tokens"):
        sample_windows(TokenList(np.arange(9)), 0, 4)


def test_lens(tiny):
    model, ids = tiny(), IDS[0]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].double()
    lens = look(model, ids, top=4)
    logs = logits.log_softmax(-1)
    np.testing.assert_allclose(lens.surprisal_T[0], np.log(61), atol=1e-9)
    expected = [-float(logs[t - 1, ids[t]]) for t in range(1, len(ids))]
    np.testing.assert_allclose(lens.surprisal_T[1:], expected, atol=1e-9)
    best = logs.exp().topk(4)
    assert (lens.predicted_ids_TX == best.indices.numpy()).all()
    np.testing.assert_allclose(lens.predicted_probability_TX, best.values, atol=1e-9)
    with torch.no_grad():
        state = model(torch.from_numpy(ids)[None]).state.grounded_BD
        grounded = model.model.decoder_hidden(state) @ model.model.embedding.weight.T
    assert (lens.grounded_ids_TX[-1] == grounded[0].topk(4).indices.numpy()).all()


MEMORY = """
import resource, sys
import numpy as np
from groundlm.analysis import geometry, default_token, horizons
states = np.empty((8, 2048, 2496), np.float32)
random = np.random.default_rng(0)
for row in states:
    row[:] = random.standard_normal(row.shape, dtype=np.float32)
flat = states.reshape(-1, 2496)
mean, covariance = geometry.covariance(flat)
geometry.norms(flat)
geometry.correlations(covariance)
default_token.stability(flat)
default_token.how_soon(states)
for centred in (False, True):
    horizons.cosine_by_lag(states, centred)
if len(sys.argv) > 1:
    geometry.eigenvalues(covariance)
    default_token.mean_state(mean, covariance, 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("arguments", [[], pytest.param(["eigenvalues"], marks=pytest.mark.slow)])
def test_peak_memory_of_the_papers_sample(arguments):
    """16,384 states of width 2496, torch and all, below 2 GB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments], env=ONE_THREAD, capture_output=True, check=True
    )
    assert int(done.stdout) < 1.4e9  # a model of that width takes 0.5 GB more
