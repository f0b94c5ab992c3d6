"""Models, tokenizers and a checkpoint folder for the tests of the scores."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from groundlm.data.tokenizer import load_tokenizer

VOCABULARY = 300


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """One layer, untied, float64 (its norms and rotations stay float32, as transformers has it)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False, max_position_embeddings=512,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(params=["gpn", "llama"])
def model(request: pytest.FixtureRequest, tiny: Callable, tiny_llama: LlamaForCausalLM) -> object:
    """A GPN+M with decoder bias, and a Llama."""
    if request.param == "llama":
        return tiny_llama
    return tiny(vocab_size=VOCABULARY, decoder_bias=True)


@pytest.fixture
def atol(model: PreTrainedModel) -> float:
    """What rounding may do: the Llama's float32 parts depend on the shape of the batch."""
    return 1e-9 if model.config.model_type == "gpn" else 1e-5


@pytest.fixture
def checkpoint(tiny: Callable, token_data: Path, tmp_path: Path) -> Path:
    """A GPN of random weights with the tokenizer of `token_data`, as a run's checkpoint."""
    folder = tmp_path / "run" / "checkpoints" / "step-000003"
    tiny(vocab_size=VOCABULARY, dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(str(token_data / "tokenizer")).save_pretrained(folder)
    return folder
