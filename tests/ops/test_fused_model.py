"""The fused scan inside the model: the reference code's numbers, precision, long windows."""

import copy

import pytest
import torch
import torch.nn.functional as F

from groundlm import GPNConfig, GPNForCausalLM
from groundlm.model import cell
from groundlm.ops import scan
from groundlm.ops.fused import ScanSettings, use_settings

EXACT = {"rtol": 0, "atol": 1e-9}


@pytest.fixture(autouse=True)
def fused_from_one_token_on(monkeypatch):
    monkeypatch.setattr(scan, "SHORT_WINDOW_TOKENS", 1)


def all_position_logits(golden, predicted_BTD):
    model = golden.model.model
    start = model.zero_state(3).predicted_BD.unsqueeze(1)
    before = torch.cat([start, predicted_BTD[:, :-1]], 1)
    return cell.linear(model.decoder_hidden(before), model.embedding.weight)


@pytest.mark.parametrize("chunk", [None, 7])
def test_golden_states_loss_and_gradients(golden, chunk):
    golden.model.scan_backend = "fused"
    tokens = golden["tokens"]
    with use_settings(ScanSettings(chunk_tokens=chunk)):
        out = golden.model.model(tokens)
        logits = all_position_logits(golden, out.last_hidden_state)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    torch.testing.assert_close(out.last_hidden_state, golden["predicted"][:, 1:], **EXACT)
    torch.testing.assert_close(logits, golden["logits"], **EXACT)
    torch.testing.assert_close(loss, golden["loss"][0], **EXACT)
    torch.testing.assert_close(out.state.grounded_BD, golden["final.grounded"], **EXACT)
    if out.state.memory_BHKV is not None:
        memory = golden["final.memory_after_last_write"]
        torch.testing.assert_close(out.state.memory_BHKV, memory, **EXACT)
    expected = {k.removeprefix("grad."): v for k, v in golden.of("grad.").items()}
    actual = {k: p.grad for k, p in golden.model.model.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, **EXACT, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("cuts", [[9, 11], [1, 19], [5, 1, 14]])
@pytest.mark.parametrize("heads", [0, 3])
def test_gradient_through_a_handed_on_state(tiny, cuts, heads):
    """C13: segments with the state passed on give the gradients of one window."""
    model = tiny(num_heads=heads)
    tokens = torch.randint(1, 61, (2, 20))

    def grads(lengths, backend):
        model.scan_backend = backend
        model.zero_grad()
        state, start, total = None, 0, 0.0
        for n in lengths:
            out = model(input_ids=tokens[:, start : start + n], past_key_values=state)
            state, start = out.past_key_values, start + n
            total = total + (out.logits**2).mean() * n
        total.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads([20], "reference")
    for lengths in ([20], cuts):
        for found, wanted in zip(grads(lengths, "fused"), expected, strict=True):
            torch.testing.assert_close(found, wanted, **EXACT)


def test_zero_embedding_rows_keep_gradients_bounded(tiny):
    """C22: a zero vector into every norm."""
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = 0
    tokens = torch.full((1, 9), 5)
    found = {}
    for backend in ("reference", "fused"):
        model.scan_backend = backend
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        found[backend] = {k: p.grad.clone() for k, p in model.named_parameters()}
    for name, wanted in found["reference"].items():
        torch.testing.assert_close(found["fused"][name], wanted, rtol=1e-9, atol=1e-9)
        # The embedding row lies behind two norms of zero vectors, each with a slope of 1e3.
        assert wanted.abs().max() < (1e6 if "embedding" in name else 1e4), name


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_matrices_with_float32_state(tiny, autocast):
    exact = tiny(dtype=torch.float32, state_size=64, ffn_size=96, head_k_dim=16, head_v_dim=24)
    low = copy.deepcopy(exact)
    if not autocast:
        for name, p in low.named_parameters():
            if p.dim() > 1 and "embedding" not in name:
                p.data = p.data.bfloat16()
    tokens = torch.randint(1, 61, (2, 40))

    def run(model, backend, autocast):
        model.scan_backend = backend
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        return out, {k: p.grad.clone() for k, p in model.named_parameters()}

    expected, exact_grads = run(exact, "reference", False)
    _, reference_grads = run(low, "reference", autocast)
    out, grads = run(low, "fused", autocast)
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-2)
    tensors = (out.cache.predicted_BD, out.cache.grounded_BD, out.cache.memory_BHKV)
    assert {x.dtype for x in tensors} == {torch.float32}
    for name, exact_grad in exact_grads.items():
        assert grads[name].dtype == low.get_parameter(name).dtype
        # As near to float32 as the reference scan in bf16 is.
        allowed = 2 * relative(reference_grads[name], exact_grad) + 0.02
        assert relative(grads[name], exact_grad) < allowed, name


def test_bf16_over_4096_tokens(tiny):
    """C21: finite, near float32, float32 state; walking on step by step stays near."""
    tokens = torch.randint(1, 61, (1, 4096))
    model = tiny(dtype=torch.bfloat16)
    exact = tiny(dtype=torch.float32)
    for m in (model, exact):
        m.scan_backend = "fused"
    with torch.no_grad():
        low, high = (m(input_ids=tokens, labels=tokens, use_cache=True) for m in (model, exact))
        assert torch.isfinite(low.loss)
        assert low.loss.item() == pytest.approx(high.loss.item(), rel=1e-2)
        assert low.cache.memory_BHKV.dtype == torch.float32
        state = None
        for t in range(4096):
            state = exact.model(tokens[:, t : t + 1], state=state).state
    drift = relative(state.predicted_BD, high.cache.predicted_BD)
    assert drift < 1e-2


@pytest.mark.slow
def test_float32_at_5m_parameters_over_2048_tokens():
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "state_size": 512, "embedding_size": 256, "ffn_size": 1344}
    config = GPNConfig(**sizes, num_heads=4, head_k_dim=64, head_v_dim=128)
    model = GPNForCausalLM(config).train()
    with torch.no_grad():  # at the start some matrices are zero, and gradients behind them too
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    tokens = torch.randint(0, 4096, (1, 2048))
    found = {}
    for backend in ("reference", "fused"):
        model.scan_backend = backend
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found[backend] = loss.item(), [p.grad.clone() for p in model.parameters()]
    assert found["fused"][0] == pytest.approx(found["reference"][0], rel=1e-5)
    for a, b in zip(found["fused"][1], found["reference"][1], strict=True):
        assert relative(a, b) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_training_over_4096_tokens(tiny, autocast):
    tokens = torch.randint(1, 61, (1, 4096))
    exact = tiny(dtype=torch.float32)
    low = exact if autocast else tiny(dtype=torch.bfloat16)
    losses = []
    for model, on in ((exact, False), (low, autocast)):
        model.scan_backend = "fused"
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
