"""Taps see every value of every step, may replace it, and change nothing by listening."""

import pytest
import torch

KINDS = [{}, {"num_heads": 0}, {"num_layers": 2}]


def places(layers, heads):
    """The documented places in their order."""
    found = ["token", "ground.gate", "grounded"]
    if heads:
        found += ["write.key", "write.value", "write.beta", "write.log_decay", "memory"]
    for i in range(layers):
        inside = [
            "gate",
            "ffn",
            "rest",
            *(["query", "answer", "read_gate", "gated", "read"] if heads else []),
        ]
        found += [f"predict.{i}.{name}" for name in inside]
    return [*found, "predicted"]


@pytest.mark.parametrize("sizes", KINDS)
@pytest.mark.parametrize("time", [1, 40])
def test_listening_sees_all_places_in_order_and_changes_nothing(tiny, sizes, time):
    model = tiny(**sizes)
    model.scan_backend = "reference"
    ids = torch.randint(1, 61, (2, time))
    plain = model(ids, labels=ids)
    seen = []

    def listen(place, value):
        seen.append(place)
        assert value.shape[0] == 2
        return value

    model.model.tap = listen
    tapped = model(ids, labels=ids)
    assert torch.equal(tapped.logits, plain.logits)
    assert seen == places(model.config.num_layers, model.config.num_heads) * time
    model.model.tap = None
    assert torch.equal(model(ids).logits, plain.logits)
    assert len(seen) % time == 0


def test_last_value_of_the_state_is_what_the_scan_returns(tiny):
    model, ids = tiny(), torch.randint(1, 61, (2, 30))
    last = {}
    model.model.tap = lambda place, value: last.setdefault(place, []).append(value) or value
    out = model.model(ids)
    assert torch.equal(torch.stack(last["predicted"], 1), out.last_hidden_state)
    assert torch.equal(last["grounded"][-1], out.state.grounded_BD)
    assert torch.equal(last["memory"][-1], out.state.memory_BHKV)


@pytest.mark.parametrize("place", places(1, 3))
def test_a_replaced_value_is_used(tiny, place):
    """Each place is on the way to the logits, and the gradient flows through the replacement."""
    model, ids = tiny(), torch.randint(1, 61, (1, 12))
    plain = model(ids).logits
    factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    model.model.tap = lambda at, value: value * factor if at == place else value
    changed = model(ids).logits
    assert (changed - plain).abs().max() > 1e-8
    changed.square().sum().backward()
    assert factor.grad.abs() > 0


def test_generation_is_tapped(tiny):
    model, ids = tiny(), torch.randint(1, 61, (1, 5))
    plain = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    model.model.tap = lambda place, value: -value if place == "predicted" else value
    changed = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert not torch.equal(plain, changed)
