"""Tiny baselines, none of whose weights is at its initial value."""

import pytest
import torch

from groundlm.models import build_model

SIZES = {
    "llama": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
              "intermediate_size": 20, "tie_word_embeddings": True},
    "gated_delta_net": {"hidden_size": 12, "num_hidden_layers": 2, "linear_num_key_heads": 2,
                        "linear_num_value_heads": 2, "linear_key_head_dim": 5,
                        "linear_value_head_dim": 7, "intermediate_size": 20,
                        "tie_word_embeddings": False},
    "mamba2": {"hidden_size": 12, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 6,
               "expand": 2, "state_size": 5, "n_groups": 1, "chunk_size": 8,
               "tie_word_embeddings": True},
}  # fmt: skip


@pytest.fixture(params=SIZES)
def sizes(request):
    return {"model_type": request.param, "vocab_size": 61} | SIZES[request.param]


@pytest.fixture
def model(sizes):
    built = build_model(sizes, seed=3).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for p in built.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return built
