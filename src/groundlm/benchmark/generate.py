"""`groundlm bench generate`: time per token of a GPN beside a Transformer of equal size."""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from groundlm.errors import UserError
from groundlm.model.config import GPNConfig
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.state import GPNState
from groundlm.models import resolve_device, versions

GIB = 1 << 30
MEMORY_BUFFER_BYTES = 1 << 29
"""Buffer by which main memory is timed: larger than any cache."""
PROMPT_CHUNK_TOKENS = 1024
"""Longest piece of a prompt read by one call, which bounds the memory for activations."""
WARM_UP_TOKENS, WARM_UP_STEPS = 64, 3
"""What is read and walked before anything is measured."""

SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "130m": (
        {},
        {"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12,
         "num_attention_heads": 12, "intermediate_size": 2752},
    ),
    "3m": (
        {"vocab_size": 4096, "state_size": 384, "embedding_size": 192, "ffn_size": 1024,
         "num_heads": 4, "head_k_dim": 64, "head_v_dim": 64},
        {"vocab_size": 4096, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
         "intermediate_size": 664},
    ),
}  # fmt: skip
"""GPN+M and Llama of equal size, by name; weights are random, which costs the same time."""


@dataclass(frozen=True)
class BenchGenerateConfig:
    """Time per token after contexts of several lengths, GPN+M against transformers' Llama.

    Both run the same sampling loop in one process; the speed of reading memory is measured beside
    them. The contexts of a batch are one context, read once and shared by its rows.
    """

    size: str = "130m"
    """Size of both models: `130m` (the paper's headline model) or `3m`."""
    contexts: list[int] = field(default_factory=lambda: [16, 1024, 4096])
    """Context lengths, in tokens."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])
    """Sequences that are continued side by side."""
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    """Weight dtypes: `float32`, `bfloat16`."""
    new_tokens: int = 128
    """Tokens written after each context; the median of their times is reported."""
    long_context: int = 100_000
    """A last context for the GPN alone at batch 1, in tokens; 0 leaves it out."""
    long_context_limit_s: float = 300.0
    """Leave the long context out, and say so, where reading it would take longer."""
    device: str = "auto"
    """Where to run: `auto`, `cpu`, `cuda`, ..."""
    seed: int = 0
    """Seed of the weights, the contexts and the sampling."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise UserError(f"size is {self.size!r}: choose one of {', '.join(SIZES)}")
        for name in ("contexts", "batch_sizes", "dtypes"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty")
        for name in ("contexts", "batch_sizes"):
            if min(getattr(self, name)) < 1:
                raise UserError(f"{name} holds {min(getattr(self, name))}: at least 1 is needed")
        for dtype in self.dtypes:
            if dtype not in ("float32", "bfloat16"):
                raise UserError(f"dtypes holds {dtype!r}: choose among float32, bfloat16")
        for name in ("long_context", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if self.new_tokens < 2:
            raise UserError(f"new_tokens is {self.new_tokens}: it must be at least 2")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    dtype: str
    batch: int
    context_tokens: int
    ms_per_token: float
    """Median time of one step, all rows of the batch together."""
    tokens_per_s: float
    carried_bytes: int
    """State, or key-value cache, of the whole batch."""
    prompt_tokens_per_s: float
    """Reading the context at batch 1."""
    share_of_memory_bound: float
    """Time to read the weights' bytes once from main memory, as a share of the time per step."""
    share_of_cache_bound: float
    """The same with a buffer as large as the weights, which the caches help as much as the model;
    stricter for models that fit into them."""


def bench_generate(config: BenchGenerateConfig) -> dict[str, Any]:
    """Measure, print a table and last a line of JSON; returns what that line holds."""
    device = resolve_device(config.device)
    memory_s_per_byte = read_seconds(MEMORY_BUFFER_BYTES, device) / MEMORY_BUFFER_BYTES
    rows: list[Row] = []
    skipped: list[str] = []
    parameters: dict[str, int] = {}
    for dtype in config.dtypes:
        for name, build in _builders(config.size).items():
            torch.manual_seed(config.seed)
            model = build().to(device=device, dtype=getattr(torch, dtype)).eval()
            parameters[name] = sum(p.numel() for p in model.parameters())
            print(f"measuring {name}, {dtype}", file=sys.stderr, flush=True)
            bench = _Bench(model, name, dtype, config, memory_s_per_byte)
            rows += bench.run()
            skipped += bench.skipped
    _print_table(rows, config)
    for line in skipped:
        Console().print(f"long context left out, {line}")
    result = {
        "size": config.size,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "memory_gib_per_s": round(1 / memory_s_per_byte / GIB, 2),
        "rows": [asdict(row) for row in rows],
        "gpn_slowest_over_fastest_context": _flatness(rows),
        "skipped": skipped,
        "versions": versions(),
    }
    print(json.dumps(result))
    return result


def read_seconds(size_bytes: int, device: torch.device) -> float:
    """Shortest time in which this process reads a buffer of that size, in seconds."""
    buffer = torch.ones(size_bytes // 4, device=device)
    tries = max(5, min(200, GIB // size_bytes))
    return min(
        _timed(function, device)
        for _ in range(tries)
        for function in (buffer.sum, lambda: torch.dot(buffer, buffer))
    )


def _timed(function: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began_s = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _builders(size: str) -> dict[str, Callable[[], PreTrainedModel]]:
    gpn, llama = SIZES[size]
    return {
        "gpn": lambda: GPNForCausalLM(GPNConfig(**gpn)),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**llama, tie_word_embeddings=True, max_position_embeddings=1 << 20)
        ),
    }


class _Bench:
    """One model: its context grows, then tokens are written after every length kept on the way."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        dtype: str,
        config: BenchGenerateConfig,
        memory_s_per_byte: float,
    ) -> None:
        self.model, self.name, self.dtype, self.config = model, name, dtype, config
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.memory_s = weight_bytes * memory_s_per_byte
        self.cache_s = read_seconds(weight_bytes, model.device)
        self.skipped: list[str] = []
        self.cache: Any = None
        self.logits: Tensor = torch.empty(0)
        self.read_tokens = 0
        self.reading_s = 0.0

    def run(self) -> list[Row]:
        self._warm_up()
        kept = {}
        for context in sorted(self.config.contexts):
            self._read_up_to(context)
            kept[context] = (copy.deepcopy(self.cache), self.logits)
        prompt_speed = self.read_tokens / self.reading_s
        alone = dict(kept)
        if self.name == "gpn" and self.config.long_context > self.read_tokens:
            expected_s = self.config.long_context / prompt_speed
            if expected_s > self.config.long_context_limit_s:
                what = f"{self.config.long_context} tokens would take {expected_s:.0f} s"
                self.skipped.append(f"{self.dtype}: {what}")
            else:
                self._read_up_to(self.config.long_context)
                alone[self.config.long_context] = (self.cache, self.logits)
        rows = []
        for batch in self.config.batch_sizes:
            points = alone if batch == 1 else kept
            cursors = {c: _shared_by(batch, *point) for c, point in points.items()}
            carried = {c: carried_bytes(cache) for c, (cache, _) in cursors.items()}
            for context, times_s in self._write(cursors).items():
                step_s = statistics.median(times_s)
                rows.append(
                    Row(
                        self.name,
                        self.dtype,
                        batch,
                        context,
                        round(1e3 * step_s, 4),
                        round(batch / step_s, 2),
                        carried[context],
                        round(prompt_speed, 1),
                        round(self.memory_s / step_s, 4),
                        round(self.cache_s / step_s, 4),
                    )
                )
        return rows

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """One read and a few steps that nobody measures: the first ones of a process are slow."""
        ids = torch.zeros(1, WARM_UP_TOKENS, dtype=torch.int64, device=self.model.device)
        cache = None
        for part in (ids, *(ids[:, :1] for _ in range(WARM_UP_STEPS))):
            cache = self.model(part, cache=cache, use_cache=True, logits_to_keep=1).cache

    @torch.inference_mode()
    def _read_up_to(self, context: int) -> None:
        vocabulary = self.model.config.vocab_size
        device = self.model.device
        while self.read_tokens < context:
            count = min(PROMPT_CHUNK_TOKENS, context - self.read_tokens)
            ids = torch.randint(vocabulary, (1, count), device=device)
            _wait(device)
            began_s = time.perf_counter()
            out = self.model(ids, cache=self.cache, use_cache=True, logits_to_keep=1)
            _wait(device)
            self.reading_s += time.perf_counter() - began_s
            self.cache, self.logits = out.cache, out.logits
            self.read_tokens += count

    @torch.inference_mode()
    def _write(self, cursors: dict[int, tuple[Any, Tensor]]) -> dict[int, list[float]]:
        """The sampling loop; times of the steps in seconds by context, the first ones left out.

        The contexts take turns, so that whatever else slows the machine falls on all of them.
        """
        device = self.model.device
        times_s: dict[int, list[float]] = {context: [] for context in cursors}
        for _ in range(self.config.new_tokens + 1):
            for context, (cache, logits) in cursors.items():
                _wait(device)
                began_s = time.perf_counter()
                next_ids = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
                out = self.model(next_ids, cache=cache, use_cache=True)
                _wait(device)
                times_s[context].append(time.perf_counter() - began_s)
                cursors[context] = (out.cache, out.logits)
        return {context: times[1:] for context, times in times_s.items()}


def _shared_by(batch: int, cache: Any, logits: Tensor) -> tuple[Any, Tensor]:
    """A context of its own for each of the rows; the original stays as it is."""
    logits = logits.expand(batch, -1, -1)
    if isinstance(cache, GPNState):
        return cache.repeat(batch), logits
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(batch)
    return cache, logits


def carried_bytes(cache: Any) -> int:
    """Bytes of a GPN's state or of a Transformer's key-value cache."""
    if isinstance(cache, GPNState):
        return cache.num_bytes
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _flatness(rows: list[Row]) -> dict[str, float]:
    """Slowest over fastest context of the GPN, by dtype and batch size."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.model == "gpn":
            groups.setdefault(f"{row.dtype} batch {row.batch}", []).append(row.ms_per_token)
    return {name: round(max(ms) / min(ms), 3) for name, ms in groups.items()}


def _print_table(rows: list[Row], config: BenchGenerateConfig) -> None:
    title = f"Generation, {config.size} parameters, {config.new_tokens} tokens each"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("model", "weights", "batch", "context", "ms per\ntoken", "tokens\nper s",
                 "carried\nMiB", "prompt\ntokens/s", "of read\nbound"):  # fmt: skip
        left = name in ("model", "weights")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in sorted(rows, key=lambda r: (r.dtype, r.batch, r.model, r.context_tokens)):
        table.add_row(
            row.model,
            row.dtype,
            str(row.batch),
            f"{row.context_tokens:,}",
            f"{row.ms_per_token:.3f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.carried_bytes / (1 << 20):,.2f}",
            f"{row.prompt_tokens_per_s:,.0f}",
            f"{row.share_of_memory_bound:.0%}",
        )
    Console().print(table)
