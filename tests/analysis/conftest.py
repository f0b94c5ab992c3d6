"""Models and data of the analyses' tests."""

from pathlib import Path

import pytest
import torch

from groundlm import GPNForCausalLM
from groundlm.data.tokenizer import load_tokenizer
from helpers import tiny_config


@pytest.fixture
def model_dir(token_data: Path, tmp_path: Path):
    """Saves a model of the test corpus' vocabulary with its tokenizer; returns the folder."""

    def save(name: str = "model", model: object = None, seed: int = 3, **sizes: object) -> str:
        if model is None:
            torch.manual_seed(seed)
            model = GPNForCausalLM(tiny_config(vocab_size=300, **sizes))
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.1 * torch.randn_like(p))
        model.save_pretrained(tmp_path / name)
        load_tokenizer(token_data / "tokenizer").save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
