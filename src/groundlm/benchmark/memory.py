"""`groundlm bench memory`: peak memory of a whole training step against the window's length."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from groundlm.allocator import keep_freed_memory
from groundlm.benchmark.train import GPN_SIZES, peak_memory_bytes
from groundlm.errors import UserError
from groundlm.model.config import GPNConfig
from groundlm.model.modeling import GPNForCausalLM
from groundlm.models import versions
from groundlm.ops.fused import ScanSettings, use_settings

MIB = 1 << 20


@dataclass(frozen=True)
class BenchMemoryConfig:
    """Peak resident memory of one AdamW step with the fused scan, one fresh process per window."""

    size: str = "headline"
    """Size of the model: `xs`, `s` or `headline` (129 M parameters)."""
    batch: int = 1
    """Sequences per step."""
    windows: list[int] = field(default_factory=lambda: [128, 512, 1024, 2048])
    """Window lengths, in tokens."""
    memory_budget_mib: int = ScanSettings().memory_budget_bytes // MIB
    """Activations kept for the backward, in MiB; longer windows are recomputed by segments."""
    seed: int = 0
    """Seed of the weights and the tokens."""

    def __post_init__(self) -> None:
        if self.size not in GPN_SIZES:
            raise UserError(f"size is {self.size!r}: choose one of {', '.join(GPN_SIZES)}")
        if not self.windows or min(self.windows) < 2:
            raise UserError(f"windows is {self.windows}: give lengths of at least 2 tokens")
        for name in ("batch", "memory_budget_mib"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")


def bench_memory(config: BenchMemoryConfig) -> dict[str, Any]:
    """Measure, print a table and, last line, JSON; returns what the JSON says."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for window in config.windows:
        with context.Pool(1) as pool:
            peaks[window] = pool.apply(peak_of_step, (config, window))
    result = {
        "config": asdict(config),
        "peak_memory_bytes": {str(k): v for k, v in peaks.items()},
        "bytes_per_token": slope(peaks, config.batch),
        "versions": versions(),
    }
    table = Table(title=f"{config.size}, {config.batch} sequences, one AdamW step, float32")
    table.add_column("window", justify="right")
    table.add_column("peak memory", justify="right")
    for window, peak in peaks.items():
        table.add_row(f"{window:,}", f"{peak / 1e9:.2f} GB")
    Console().print(table)
    print(json.dumps(result))
    return result


def slope(peaks: dict[int, int], batch: int) -> float | None:
    """Bytes per token of one sequence between the shortest and the longest window."""
    short, long = min(peaks), max(peaks)
    return None if short == long else (peaks[long] - peaks[short]) / (long - short) / batch


def peak_of_step(config: BenchMemoryConfig, window: int) -> int:
    """Peak resident memory of this process after two whole training steps, in bytes."""
    keep_freed_memory()
    torch.manual_seed(config.seed)
    model = GPNForCausalLM(GPNConfig(**GPN_SIZES[config.size])).train()
    model.scan_backend = "fused"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens_BT = torch.randint(0, model.config.vocab_size, (config.batch, window))
    with use_settings(ScanSettings(memory_budget_bytes=config.memory_budget_mib * MIB)):
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss.backward()
            optimizer.step()
    return peak_memory_bytes()
