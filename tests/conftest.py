"""Shared pieces of the tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from groundlm import GPNConfig, GPNForCausalLM

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = ["gpn", "gpn_m_1l", "gpn_m_1l_bias", "gpn_m_2l"]

torch.set_num_threads(2)


class Golden:
    """One file of the reference code's numbers, with a model that holds its parameters."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as f:
            sizes = json.loads(f.metadata()["config"])
            self.tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
        config = GPNConfig(
            vocab_size=sizes["vocab_size"],
            state_size=sizes["d_state"],
            embedding_size=sizes["d_emb"],
            ffn_size=sizes["d_ffn"],
            num_layers=sizes.get("n_layers", 1),
            num_heads=sizes.get("n_heads", 0),
            head_k_dim=sizes.get("d_key", 1),
            head_v_dim=sizes.get("d_val", 1),
            decoder_bias=sizes.get("use_decoder_bias", False),
        )
        self.model = GPNForCausalLM(config).double()
        self.model.load_state_dict(
            {f"model.{k.removeprefix('param.')}": v for k, v in self.of("param.").items()}
        )

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def of(self, prefix: str) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.tensors.items() if k.startswith(prefix)}


@pytest.fixture(params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def tiny_config(**sizes: object) -> GPNConfig:
    """Odd sizes everywhere, so that no two axes can be mixed up unnoticed."""
    defaults = dict(
        vocab_size=61,
        state_size=20,
        embedding_size=11,
        ffn_size=23,
        num_layers=1,
        num_heads=3,
        head_k_dim=5,
        head_v_dim=7,
    )
    return GPNConfig(**(defaults | sizes))


@pytest.fixture
def tiny() -> Callable[..., GPNForCausalLM]:
    """Builds a small float64 model whose weights are all off their initial values."""

    def build(seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: object) -> GPNForCausalLM:
        torch.manual_seed(seed)
        model = GPNForCausalLM(tiny_config(**sizes)).to(dtype).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        return model

    return build
