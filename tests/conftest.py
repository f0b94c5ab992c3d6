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

# Tiny models: a second thread only waits, and waits long when something else runs.
torch.set_num_threads(1)


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
    defaults = {
        "vocab_size": 61,
        "state_size": 20,
        "embedding_size": 11,
        "ffn_size": 23,
        "num_layers": 1,
        "num_heads": 3,
        "head_k_dim": 5,
        "head_v_dim": 7,
    }
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


WORDS = ["the", "state", "memory", "reads", "a", "token", "and", "writes", "it", "back", "again",
         "ground", "predict", "decode", "of", "in", "one", "vector", "é", "日本"]  # fmt: skip


def write_documents(path: Path, count: int, seed: int = 0) -> None:
    """JSONL documents of 5 to 60 words; word order is learnable (each word prefers the next)."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(count):
        length = int(torch.randint(5, 60, (1,), generator=generator))
        at, words = 0, []
        for _ in range(length):
            jump = int(torch.randint(0, 10, (1,), generator=generator))
            at = (at + (1 if jump < 8 else jump)) % len(WORDS)
            words.append(WORDS[at])
        lines.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n")


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
