"""The three kinds of GPN that every contract test runs on."""

from collections.abc import Callable

import pytest
import torch

from groundlm import GPNForCausalLM

KINDS = {"memory": {}, "two layers": {"num_layers": 2}, "no memory": {"num_heads": 0}}
V = 61


@pytest.fixture(params=KINDS, ids=lambda k: k.replace(" ", "_"))
def kind(request: pytest.FixtureRequest) -> dict[str, int]:
    return KINDS[request.param]


@pytest.fixture
def m(tiny: Callable[..., GPNForCausalLM], kind: dict[str, int]) -> GPNForCausalLM:
    """A float64 model of each kind, off its initial values, in which history matters."""
    model = tiny(pad_token_id=0, **kind)
    a = torch.arange(1, 13)[None]
    b = a.clone()
    b[0, 0] = 40
    assert (model(a).logits[0, -1] - model(b).logits[0, -1]).abs().max() > 1e-6
    return model


@pytest.fixture
def ids() -> Callable[..., torch.Tensor]:
    """Random token ids of a shape; the pad id 0 is not among them."""
    torch.manual_seed(7)
    return lambda *shape: torch.randint(1, V, shape)
