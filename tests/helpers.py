"""What the tests share besides fixtures: the reference's numbers, small sizes, small texts."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from safetensors import safe_open

from groundlm import GPNConfig, GPNForCausalLM

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = ["gpn", "gpn_m_1l", "gpn_m_1l_bias", "gpn_m_2l"]
GPN = {"model_type": "gpn", "state_size": 20, "embedding_size": 12, "ffn_size": 24, "num_heads": 2,
       "head_k_dim": 5, "head_v_dim": 7}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 8, "tie_word_embeddings": True}  # fmt: skip


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


# The tests use one thread, and sums depend on the number of threads.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def train_command(config: object, path: Path) -> list[str]:
    """The command line of a training configuration, written to `path`."""
    path.write_text(yaml.safe_dump(asdict(config)))  # type: ignore[call-overload]
    return [sys.executable, "-m", "groundlm", "train", "--config", str(path)]


def metrics(run: Path) -> list[dict]:
    """The records of a run, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step, in the order of the file."""
    return {r["step"]: r["loss_nats"] for r in metrics(run) if "loss_nats" in r}


def last_tensors(run: Path) -> dict[str, bytes]:
    """Every tensor file of a run's last checkpoint: weights, moments, average, carried state."""
    from groundlm.training.checkpoint import checkpoints

    last = checkpoints(run)[-1]
    found = {str(p.relative_to(last)): p.read_bytes() for p in last.rglob("*.safetensors")}
    assert {"model.safetensors", "training/optimizer.safetensors"} <= found.keys()
    return found
