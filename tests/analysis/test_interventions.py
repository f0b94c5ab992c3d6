"""Every intervention against a recurrence written out by hand, with the same thing changed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from groundlm.analysis import interventions as act
from groundlm.analysis.means import place_means
from groundlm.analysis.taps import listening, replacing
from groundlm.errors import UserError

H, K, V, T = 3, 5, 7, 24


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()


def by_hand(
    model, ids, *, out=lambda s: s, read_scale=1.0, beta_scale=1.0, silent=(), decay=None,
    frozen=None, swapped=None, key_of=None, unwritten=None, ffn=None, gate=None, reset=None,
):  # fmt: skip
    """Logits [B, T, W] of a one-layer GPN+M, one token after the other."""
    w = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    batch, width = len(ids), w["ground.gate.weight"].shape[0]
    p, g, m = torch.zeros(batch, width), torch.zeros(batch, width), torch.zeros(batch, H, K, V)
    p, g, m = p.double(), g.double(), m.double()
    logits, keys = [], []
    for t in range(ids.shape[1]):
        if reset and t % reset == 0:
            p, g, m = torch.zeros_like(p), torch.zeros_like(g), torch.zeros_like(m)
        e = rms(w["embedding.weight"][ids[:, t]], w["ground.token_norm.weight"])
        keep = torch.sigmoid(
            rms(p, w["ground.gate_norm.weight"]) @ w["ground.gate.weight"].T + w["ground.gate.bias"]
        )
        g_before, g = g, (keep if gate is None else gate) * p + e @ w["ground.token_proj.weight"].T
        here = rms(g, w["memory.write_norm.weight"])
        there = rms(g_before, w["memory.write_norm.weight"])
        k = torch.relu(there @ w["memory.key.weight"].T + w["memory.key.bias"])
        k = unit(k.view(batch, H, K))
        keys.append(k)
        if key_of is not None:
            k = keys[key_of[t]]
        v = (here @ w["memory.value.weight"].T).view(batch, H, V)
        beta = beta_scale * torch.sigmoid(here @ w["memory.beta.weight"].T)
        if unwritten is not None and t >= unwritten:
            beta = torch.zeros_like(beta)
        rate = F.softplus(here @ w["memory.decay.weight"].T + w["memory.dt_bias"])
        gamma = -w["memory.A_log"].exp() * rate
        for h, value in (decay or {}).items():
            gamma[:, h] = value
        if frozen is None or t < frozen:
            fix = v - torch.einsum("bhkv,bhk->bhv", m, k)
            m = gamma.exp()[..., None, None] * m + torch.einsum("bh,bhk,bhv->bhkv", beta, k, fix)
        if swapped is not None and swapped[0] == t + 1:
            m = torch.from_numpy(swapped[1]).expand_as(m)
        a, b = (rms(g, w["predict.0.ffn.norm.weight"]) @ w["predict.0.ffn.up.weight"].T).chunk(
            2, -1
        )
        inner = (F.silu(a) * b) @ w["predict.0.ffn.down.weight"].T if ffn is None else ffn
        y = rms(g, w["predict.0.read.norm.weight"])
        q = torch.relu(y @ w["predict.0.read.query.weight"].T + w["predict.0.read.query.bias"])
        answer = torch.einsum("bhkv,bhk->bhv", m, unit(q.view(batch, H, K))).flatten(1)
        gated = F.silu(y @ w["predict.0.read.gate.weight"].T)
        gated = gated * rms(answer, w["predict.0.read.out_norm.weight"])
        for h in silent:
            gated[:, h * V : (h + 1) * V] = 0
        carried = torch.sigmoid(
            rms(g, w["predict.0.gate_norm.weight"]) @ w["predict.0.gate.weight"].T
            + w["predict.0.gate.bias"]
        )
        read = read_scale * gated @ w["predict.0.read.out.weight"].T
        p = out(carried * g + inner + read)
        hidden = rms(p, w["decode.norm.weight"]) @ w["decode.proj.weight"].T
        logits.append(hidden @ w["embedding.weight"].T)
    return torch.stack(logits, 1)


@pytest.fixture
def model(tiny):
    return tiny()


@pytest.fixture
def ids():
    return torch.randint(1, 61, (3, T), generator=torch.Generator().manual_seed(5))


def without(direction):
    n = torch.from_numpy(direction / np.linalg.norm(direction))
    return lambda s: s - (s * n).sum(-1, keepdim=True) * n


DIRECTION = np.linspace(-1, 2, 20)
FOREIGN = np.random.default_rng(0).normal(size=(H, K, V))

CASES = {
    "project_out": (lambda m: act.project_out(m, DIRECTION), {"out": without(DIRECTION)}),
    "subtract": (
        lambda m: act.subtract(m, DIRECTION),
        {"out": lambda s: s - torch.from_numpy(DIRECTION)},
    ),
    "silence one": (lambda m: act.silence_heads(m, [1]), {"silent": [1]}),
    "silence pool": (lambda m: act.silence_heads(m, [0, 2]), {"silent": [0, 2]}),
    "clamp decay": (
        lambda m: act.clamp_decay(m, [2], np.array([-1.0, -2.0, -0.25])),
        {"decay": {2: -0.25}},
    ),
    "read off": (act.read_off, {"read_scale": 0.0}),
    "write off": (act.write_off, {"beta_scale": 0.0}),
    "frozen": (lambda m: act.freeze_memory(m, 5), {"frozen": 5}),
    "frozen empty": (lambda m: act.freeze_memory(m, 0), {"frozen": 0}),
    "unwritten": (lambda m: act.write_off(m, 6), {"unwritten": 6}),
    "swapped": (lambda m: act.swap_memory(m, 4, FOREIGN), {"swapped": (4, FOREIGN)}),
    "gate": (lambda m: act.fix(m, {"ground.gate": np.full(20, 0.3)}), {"gate": 0.3}),
    "ffn": (
        lambda m: act.fix(m, {"predict.*.ffn": DIRECTION}),
        {"ffn": torch.from_numpy(DIRECTION)},
    ),
    "reset": (lambda m: act.reset_every(m, 7), {"reset": 7}),
    "reset each": (lambda m: act.reset_every(m, 1), {"reset": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_intervention_is_what_it_says(model, ids, name):
    enter, changes = CASES[name]
    with torch.no_grad():
        plain = model(ids).logits
        torch.testing.assert_close(plain, by_hand(model, ids), atol=1e-9, rtol=0)
        with enter(model):
            for _ in range(2):  # what a tap counts starts anew with each call
                changed = model(ids).logits
                torch.testing.assert_close(
                    changed, by_hand(model, ids, **changes), atol=1e-9, rtol=0
                )
        assert (changed - plain).abs().max() > 1e-6
        assert torch.equal(model(ids).logits, plain)
    assert model.model.tap is None


def test_shuffled_keys(model, ids):
    random = np.random.default_rng(4)
    key_of = [int(random.integers(max(1, t))) for t in range(T)]
    with torch.no_grad(), act.shuffle_keys(model, seed=4):
        changed = model(ids).logits
    torch.testing.assert_close(changed, by_hand(model, ids, key_of=key_of), atol=1e-9, rtol=0)
    assert all(source < t for t, source in enumerate(key_of) if t)


def test_memory_after_a_text(model, ids):
    with torch.no_grad():
        expected = model(ids[1:2, :9]).state.memory_BHKV[0]
    np.testing.assert_allclose(act.memory_after(model, ids[1, :9].numpy()), expected, atol=1e-12)


def test_resets_add_to_each_other_and_to_those_of_the_call(model, ids):
    every = torch.arange(T) % 6 == 0
    with torch.no_grad():
        with act.reset_every(model, 6), act.reset_every(model, 4):
            both = model(ids).logits
        hand = model(ids, resets=(every | (torch.arange(T) % 4 == 0)).expand(3, T)).logits
        torch.testing.assert_close(both, hand, atol=1e-12, rtol=0)
        at_nine = (torch.arange(T) == 9).expand(3, T)
        with act.reset_every(model, 6):
            documents = model(ids, resets=at_nine).logits
            embedded = model(inputs_embeds=model.model.embedding(ids)).logits
            with pytest.raises(UserError, match="not with position_ids"):
                model(ids, position_ids=torch.arange(T).expand(3, T))
        hand = model(ids, resets=at_nine | every).logits
        torch.testing.assert_close(documents, hand, atol=1e-12, rtol=0)
        torch.testing.assert_close(embedded, by_hand(model, ids, reset=6), atol=1e-9, rtol=0)


def test_interventions_nest_and_end_with_an_error(model, ids):
    seen = []
    with torch.no_grad():
        with (
            replacing(model, "predicted", lambda s: 2 * s),
            listening(model, "predicted", lambda _, s: seen.append(s)),
            act.read_off(model),
        ):
            doubled = model(ids).logits
        expected = by_hand(model, ids, read_scale=0.0, out=lambda s: 2 * s)
        torch.testing.assert_close(doubled, expected, atol=1e-9, rtol=0)
        assert len(seen) == T
        with pytest.raises(RuntimeError), replacing(model, "predicted", lambda s: s[:, :3]):
            model(ids)
        torch.testing.assert_close(model(ids).logits, by_hand(model, ids), atol=1e-9, rtol=0)
    assert model.model.tap is None


def test_place_means(tiny):
    model, ids = tiny(num_layers=2), torch.randint(1, 61, (5, 9))
    found = []
    with torch.no_grad(), listening(model, "predict.1.ffn", lambda _, x: found.append(x)):
        model(ids)
    means = place_means(model, ids.numpy(), ["predict.*.ffn", "ground.gate"], batch_size=2)
    assert set(means) == {"predict.0.ffn", "predict.1.ffn", "ground.gate"}
    expected = torch.stack(found).mean((0, 1)).numpy()
    np.testing.assert_allclose(means["predict.1.ffn"], expected, atol=1e-12)


def test_refusals(model):
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=2)
    )  # fmt: skip
    with pytest.raises(UserError, match="this model is a llama"):
        act.read_off(llama).__enter__()
    with pytest.raises(UserError, match="head 3 is not there: the memory has 3 heads"):
        act.silence_heads(model, [3])
    with pytest.raises(UserError, match="zero length"):
        act.project_out(model, np.zeros(20))
    with pytest.raises(UserError, match="every 0 tokens"):
        act.reset_every(model, 0).__enter__()
    for bad in (np.full(20, np.nan), np.ones(19)):
        for make in (act.project_out, act.subtract):
            with pytest.raises(UserError, match="give 20 finite numbers"):
                make(model, bad)
    for bad in (np.array([-1.0, 0.5, -1.0]), np.array([-1.0]), np.full(3, np.nan)):
        with pytest.raises(UserError, match="give 3 values of at most 0"):
            act.clamp_decay(model, [0], bad)
    with pytest.raises(UserError, match="after -3 tokens: it must be at least 0"):
        act.freeze_memory(model, -3)
    with pytest.raises(UserError, match="after 0 tokens: it must be at least 1"):
        act.swap_memory(model, 0, FOREIGN)


@pytest.mark.parametrize("pattern", ["predict.0.reed", "predict.7.ffn"])
def test_places_that_are_not_there_are_told(model, ids, pattern):
    for enter in (
        replacing(model, pattern, torch.zeros_like),
        listening(model, pattern, print),
        act.fix(model, {"ground.gate": np.zeros(20), pattern: np.zeros(20)}),
    ):
        with pytest.raises(UserError, match=f"no place of the model matches '{pattern}'"), enter:
            model(ids)
    with replacing(model, pattern, torch.zeros_like):
        pass  # nothing was computed, so nothing can be said


def test_a_gpn_without_memory_has_none_to_change(tiny):
    model = tiny(num_heads=0)
    for make in (
        lambda: act.read_off(model),
        lambda: act.write_off(model),
        lambda: act.freeze_memory(model, 3),
        lambda: act.swap_memory(model, 3, FOREIGN),
        lambda: act.shuffle_keys(model),
        lambda: act.memory_after(model, np.arange(3)),
        lambda: act.silence_heads(model, []),
        lambda: act.clamp_decay(model, [], np.array([])),
    ):
        with pytest.raises(UserError, match="this gpn has no memory to change"):
            make()
