"""Shared fixtures of the tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groundlm import GPNForCausalLM
from helpers import GOLDEN_NAMES, Golden, tiny_config, write_documents

# Tiny models: a second thread only waits, and waits long when something else runs.
torch.set_num_threads(1)


@pytest.fixture(params=GOLDEN_NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


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


@pytest.fixture(scope="session")
def token_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared corpus: about 8,000 tokens of a 300-entry vocabulary, two splits."""
    from groundlm.data.prepare import PrepareConfig, prepare

    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "text.jsonl", 300)
    data = folder / "data"
    prepare(PrepareConfig([str(folder / "text.jsonl")], str(data), tokenizer="train:300"))
    return data


@pytest.fixture
def train_config(token_data: Path, tmp_path: Path) -> Callable[..., object]:
    """Builds the configuration of a run of seconds; `section__field=value` overrules it."""
    from groundlm.training.config import DataConfig, OptimizerConfig, TrainConfig, TrainingConfig

    def build(out: str = "run", **values: object) -> TrainConfig:
        sections: dict[str, dict[str, object]] = {
            "model": {"state_size": 20, "embedding_size": 12, "ffn_size": 24, "num_heads": 2,
                      "head_k_dim": 5, "head_v_dim": 7},
            "data": {"path": str(token_data), "window_tokens": 16},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
            "training": {"out": str(tmp_path / out), "steps": 10, "batch_size": 4, "log_every": 1,
                         "eval_every": 0, "eval_windows": 4, "save_every": 100},
        }  # fmt: skip
        for name, value in values.items():
            section, field = name.split("__")
            sections[section][field] = value
        return TrainConfig(
            model=sections["model"],
            data=DataConfig(**sections["data"]),
            optimizer=OptimizerConfig(**sections["optimizer"]),
            training=TrainingConfig(**sections["training"]),
        )

    return build
