"""The model against the paper's reference code, float64, every number within 1e-9."""

import pytest
import torch
import torch.nn.functional as F

from groundlm.model import cell

TOLERANCE = {"rtol": 0, "atol": 1e-9}


def all_position_logits(golden, predicted_BTD):
    """Logits for tokens 0..T-1 given the tokens before each: the start state predicts token 0."""
    model = golden.model.model
    start = model.zero_state(3).predicted_BD.unsqueeze(1)
    before = torch.cat([start, predicted_BTD[:, :-1]], 1)
    return cell.linear(model.decoder_hidden(before), model.embedding.weight)


def test_logits_states_memory_and_loss(golden):
    tokens = golden["tokens"]
    out = golden.model.model(tokens)
    predicted = golden["predicted"][:, 1:]
    torch.testing.assert_close(out.last_hidden_state, predicted, **TOLERANCE)
    logits = all_position_logits(golden, out.last_hidden_state)
    torch.testing.assert_close(logits, golden["logits"], **TOLERANCE)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(loss, golden["loss"][0], **TOLERANCE)
    torch.testing.assert_close(out.state.grounded_BD, golden["final.grounded"], **TOLERANCE)
    if out.state.memory_BHKV is not None:
        memory = golden["final.memory_after_last_write"]
        torch.testing.assert_close(out.state.memory_BHKV, memory, **TOLERANCE)


def test_grounded_states_and_reference_carry_step_by_step(golden):
    state, memories, grounded = None, [], []
    for t in range(19):
        state = golden.model.model(golden["tokens"][:, t : t + 1], state=state).state
        grounded.append(state.grounded_BD)
        memories.append(state.memory_BHKV)
    torch.testing.assert_close(torch.stack(grounded, 1), golden["grounded"], **TOLERANCE)
    if golden.model.model.memory is not None:
        torch.testing.assert_close(memories[-2], golden["final.memory"], **TOLERANCE)
        torch.testing.assert_close(grounded[-2], golden["final.grounded_prev"], **TOLERANCE)


def test_every_gradient(golden):
    out = golden.model.model(golden["tokens"])
    logits = all_position_logits(golden, out.last_hidden_state)
    F.cross_entropy(logits.flatten(0, 1), golden["tokens"].flatten()).backward()
    expected = {k.removeprefix("grad."): v for k, v in golden.of("grad.").items()}
    actual = {k: p.grad for k, p in golden.model.model.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, **TOLERANCE, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("cuts", [[1] * 19, [1, 18], [7, 5, 7], [18, 1]])
def test_any_split_with_the_state_handed_on(golden, cuts):
    state, parts, start = None, [], 0
    for n in cuts:
        out = golden.model(golden["tokens"][:, start : start + n], state=state)
        state, start = out.state, start + n
        parts.append(out.logits)
    whole = golden.model(golden["tokens"])
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **TOLERANCE)
    torch.testing.assert_close(parts[0][:, 0], golden["logits"][:, 1], **TOLERANCE)
    for name in ("predicted_BD", "grounded_BD", "memory_BHKV", "tokens_seen"):
        torch.testing.assert_close(
            getattr(state, name), getattr(whole.state, name), **TOLERANCE
        ) if getattr(state, name) is not None else None
    assert state.get_seq_length() == 19


def test_loss_with_the_usual_shift(golden):
    tokens = golden["tokens"]
    expected = F.cross_entropy(golden["logits"][:, 1:].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(golden.model(tokens, labels=tokens).loss, expected, **TOLERANCE)
