"""`groundlm bench train`: whole training steps, the fused scan beside what else one could run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from groundlm.allocator import keep_freed_memory
from groundlm.errors import RunFault, UserError
from groundlm.model.config import GPNConfig
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.products import product
from groundlm.models import versions
from groundlm.ops.fused import settings_in_use

GPN_SIZES: dict[str, dict[str, int]] = {
    "xs": {"vocab_size": 2048, "state_size": 256, "embedding_size": 128, "ffn_size": 704,
           "num_heads": 4, "head_k_dim": 32, "head_v_dim": 64},
    "s": {"vocab_size": 4096, "state_size": 512, "embedding_size": 256, "ffn_size": 1344,
          "num_heads": 4, "head_k_dim": 64, "head_v_dim": 128},
    "headline": {},
}  # fmt: skip
"""GPN+M sizes by name; `headline` is the paper's 129 M model."""

LLAMA_SIZES: dict[str, dict[str, int]] = {
    "xs": {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 5,
           "num_attention_heads": 4, "intermediate_size": 352},
    "s": {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 5,
          "num_attention_heads": 4, "intermediate_size": 688},
    "headline": {"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12,
                 "num_attention_heads": 12, "intermediate_size": 2752},
}  # fmt: skip
"""Llama (tied embedding) of equal parameter count, by the same names."""

CHECK_WINDOW = (2, 24)
LOSS_TOLERANCE = 1e-5
GRAD_TOLERANCE = 1e-3
SQUARE = 2048
"""Side of the square product that measures the machine's matrix rate."""
MULTIPLIERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": torch.mm,
    "groundlm": product,
}
"""torch's own product and ours; the faster of the two is the machine's matrix rate."""


@dataclass(frozen=True)
class BenchTrainConfig:
    """Training speed on one batch of random tokens, float32, in one process and in turn.

    Whole steps count: forward, loss, backward, AdamW. Nothing is printed before both backends have
    given the same loss and gradients on a short window.
    """

    size: str = "s"
    """Size of the models: `xs` (1.3 M parameters), `s` (5 M) or `headline` (129 M)."""
    batch: int = 16
    """Sequences per step."""
    window: int = 256
    """Tokens per sequence."""
    rounds: int = 5
    """Rounds of one step each, in turn; medians are reported. One round before is not counted."""
    reference_rounds: int = 2
    """Rounds in which the slow reference backend takes part; 0 leaves it out."""
    seed: int = 0
    """Seed of the weights and the tokens."""

    def __post_init__(self) -> None:
        if self.size not in GPN_SIZES:
            raise UserError(f"size is {self.size!r}: choose one of {', '.join(GPN_SIZES)}")
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.window < 2:
            raise UserError(f"window is {self.window}: a step needs at least 2 tokens")
        if self.reference_rounds < 0:
            raise UserError(f"reference_rounds is {self.reference_rounds}: it must be 0 or more")


def bench_train(config: BenchTrainConfig) -> dict[str, Any]:
    """Measure, print a table and, last line, JSON; returns what the JSON says."""
    keep_freed_memory()
    torch.manual_seed(config.seed)
    gpn = GPNForCausalLM(GPNConfig(**GPN_SIZES[config.size])).train()
    check_backends(gpn)
    llama_config = LlamaConfig(
        **LLAMA_SIZES[config.size],
        max_position_embeddings=config.window,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",
    )
    llama = LlamaForCausalLM(llama_config).train()
    tokens_BT = torch.randint(0, gpn.config.vocab_size, (config.batch, config.window))
    steps = {
        "reference": _training_step(gpn, tokens_BT, "reference"),
        "fused": _training_step(gpn, tokens_BT, "fused"),
        "llama": _training_step(llama, tokens_BT),
    }
    times_s, rates = _measure(steps, config)
    result = _result(config, gpn, llama, times_s, rates)
    _show(result)
    print(json.dumps(result))
    return result


def check_backends(model: GPNForCausalLM) -> None:
    """Raise `RunFault` unless both backends give one loss and one gradient on a short window."""
    tokens_BT = torch.randint(0, model.config.vocab_size, CHECK_WINDOW)
    found: dict[str, tuple[float, list[Tensor]]] = {}
    for backend in ("reference", "fused"):
        model.scan_backend = backend
        model.zero_grad()
        loss = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        loss.backward()
        found[backend] = (loss.item(), [p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    loss_error = abs(found["fused"][0] / found["reference"][0] - 1)
    grad_error = max(
        float((a - b).norm() / b.norm().clamp_min(1e-12))
        for a, b in zip(found["fused"][1], found["reference"][1], strict=True)
    )
    if not (loss_error < LOSS_TOLERANCE and grad_error < GRAD_TOLERANCE):
        raise RunFault(
            f"fused and reference differ: loss by {loss_error:.1e}, a gradient by {grad_error:.1e} "
            f"(allowed {LOSS_TOLERANCE}, {GRAD_TOLERANCE}); no speed is worth printing"
        )


def _training_step(
    model: PreTrainedModel, tokens_BT: Tensor, backend: str | None = None
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        if backend is not None:
            model.scan_backend = backend
        optimizer.zero_grad()
        model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss.backward()
        optimizer.step()

    return step


def _measure(
    steps: dict[str, Callable[[], None]], config: BenchTrainConfig
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    rates: dict[str, list[float]] = {name: [] for name in MULTIPLIERS}
    for turn in range(config.rounds + 1):
        for name, step in steps.items():
            if name == "reference" and turn > config.reference_rounds - 1:
                continue
            start = time.perf_counter()
            step()
            # The reference compiles nothing, so its first step counts.
            if turn or name == "reference":
                times_s[name].append(time.perf_counter() - start)
        for name, multiply in MULTIPLIERS.items():
            rates[name].append(matmul_rate(multiply))
    return times_s, rates


def matmul_rate(multiply: Callable[[Tensor, Tensor], Tensor], side: int = SQUARE) -> float:
    """Floating-point operations per second of a square float32 product, the best of three."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    multiply(a, b)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        multiply(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far (0 where the system does not tell)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024


def _result(
    config: BenchTrainConfig,
    gpn: GPNForCausalLM,
    llama: LlamaForCausalLM,
    times_s: dict[str, list[float]],
    rates: dict[str, list[float]],
) -> dict[str, Any]:
    tokens = config.batch * config.window
    speed = {k: tokens / statistics.median(v) for k, v in times_s.items() if v}
    parameters = sum(p.numel() for p in gpn.parameters())
    rate = {name: statistics.median(values) for name, values in rates.items()}
    limit = max(rate.values()) / (6 * parameters)
    reference = speed.get("reference")
    return {
        "config": asdict(config),
        "parameters": parameters,
        "llama_parameters": sum(p.numel() for p in llama.parameters()),
        "tokens_per_s": {k: round(v, 1) for k, v in speed.items()},
        "fused_over_llama": round(speed["fused"] / speed["llama"], 3),
        "fused_over_reference": round(speed["fused"] / reference, 2) if reference else None,
        "matmul_gflop_per_s": {k: round(v / 1e9, 1) for k, v in rate.items()},
        "share_of_matmul_limit": {k: round(v / limit, 3) for k, v in speed.items()},
        "peak_memory_bytes": peak_memory_bytes(),
        "threads": torch.get_num_threads(),
        "fused_settings": asdict(settings_in_use()),
        "versions": versions(),
    }


def _show(result: dict[str, Any]) -> None:
    config = result["config"]
    title = f"{config['size']}, {config['batch']} x {config['window']}, float32, whole steps"
    table = Table(title=title)
    for column in ("model", "parameters", "tokens/s", "share of the matrix limit"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, speed in result["tokens_per_s"].items():
        size = result["llama_parameters" if name == "llama" else "parameters"]
        share = result["share_of_matmul_limit"][name]
        table.add_row(name, f"{size:,}", f"{speed:,.0f}", f"{share:.2f}")
    Console().print(table)
