"""Held-out perplexity and bits per byte, every token scored exactly once.

The split is one stream of tokens. It is cut into disjoint windows; within a window each token is
predicted from the tokens of its own window before it and from the one token before the window (for
the very first: the end-of-document token), starting from the zero state.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.data.tokenizer import tokenizer_sha256
from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError
from groundlm.model.loading import load_model
from groundlm.model.modeling import GPNForCausalLM
from groundlm.models import load_model_tokenizer, resolve_device, versions

DEFAULT_WINDOW_TOKENS = 2048
SLICE_LOGITS = 1 << 22
"""Logits held at a time while scoring: 16 MiB in float32."""


@dataclass(frozen=True)
class EvalConfig:
    """Score a model on held-out text: perplexity, and bits per byte beside the unigram model's."""

    model: str
    """Model folder: a checkpoint, or anything that `save_pretrained` wrote with its tokenizer."""
    data: str
    """Folder written by `groundlm prepare` with the model's tokenizer."""
    split: str = "heldout"
    """Split to score: `heldout` or `train`."""
    window_tokens: int | None = None
    """Tokens per window. None: the window the model was trained with, else 2048."""
    batch_size: int = 16
    """Windows scored at a time; it does not change the result."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; `auto` takes a GPU if there is one."""


@torch.inference_mode()
def token_nats(model: PreTrainedModel, input_ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nats, float32 [B, T].

    Logits exist for a slice of positions at a time. Works for every transformers causal language
    model whose head is a matrix over its base model's last hidden state.
    """
    hidden = model.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
    if isinstance(model, GPNForCausalLM):
        hidden = model.model.decoder_hidden(hidden)
    weight = model.get_output_embeddings().weight
    hidden_NE, targets_N = hidden.flatten(0, 1), targets_BT.flatten()
    rows = max(1, SLICE_LOGITS // weight.shape[0])
    nats = [
        F.cross_entropy((h.to(weight.dtype) @ weight.T).float(), y, reduction="none")
        for h, y in zip(hidden_NE.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.cat(nats).view(targets_BT.shape)


def score_split(
    model: PreTrainedModel,
    split: TokenSplit,
    window_tokens: int,
    batch_size: int,
    max_windows: int = 0,
    part: tuple[int, int] = (0, 1),
) -> np.ndarray:
    """Nats of every token of the split in order, float32 [tokens]; windows as the module says.

    `max_windows` > 0 scores the first so many whole windows only (at least one window, which may
    be short); `part` (i, n) only every n-th batch, from the i-th on.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    scored = [torch.empty(0)]
    batches = _batches(split, window_tokens, batch_size, max_windows)
    for inputs, targets in islice(batches, part[0], None, part[1]):
        scored.append(token_nats(model, inputs.to(device), targets.to(device)).cpu().flatten())
    model.train(was_training)
    return torch.cat(scored).numpy()


def _batches(
    split: TokenSplit, window: int, batch_size: int, max_windows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) [B, T] over the stream; the short last window comes alone."""
    total = split.tokens
    if max_windows:
        total = min(total, max_windows * window)
    starts = list(range(0, total - window + 1, window))
    groups = [starts[i : i + batch_size] for i in range(0, len(starts), batch_size)]
    rest = total % window
    for group in [*groups, *([[total - rest]] if rest else [])]:
        length = min(window, total - group[0])
        rows = [_window(split, start, length) for start in group]
        stacked = torch.from_numpy(np.stack(rows))
        yield stacked[:, :-1], stacked[:, 1:]


def _window(split: TokenSplit, start: int, length: int) -> np.ndarray:
    """`length + 1` tokens: the one before `start` (end-of-document before the first), then on."""
    if start:
        return split.read(start - 1, length + 1)
    return np.concatenate([[split.eos_token_id], split.read(0, length)])


def heldout_nats(
    model: PreTrainedModel,
    split: TokenSplit,
    window_tokens: int,
    batch_size: int,
    windows: int,
    part: tuple[int, int] = (0, 1),
) -> tuple[float, int]:
    """Summed nats and number of tokens over the first `windows` windows of a split (0: all of it).

    `part` (i, n) scores only every n-th batch, from the i-th on, for n processes to share.
    """
    nats = score_split(model, split, window_tokens, batch_size, windows, part)
    return float(nats.sum(dtype=np.float64)), len(nats)


def bits_per_byte(
    nats: np.ndarray, tokens: np.ndarray, eos_token_id: int, utf8_bytes: int
) -> float:
    """`sum of nats / ln 2 / UTF-8 bytes`, the end-of-document tokens left out of both sums."""
    text = nats[tokens != eos_token_id].sum(dtype=np.float64)
    return float(text / math.log(2) / utf8_bytes)


def unigram_nats(train: TokenSplit, tokens: np.ndarray) -> np.ndarray:
    """Nats of each token under the training split's token counts, one added to each count."""
    counts = train.unigram_counts() + 1
    return -np.log(counts / counts.sum())[tokens]


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Score, print a table and, as the last line of stdout, the result as JSON.

    Raises:
        UserError: a model, split or window that does not fit.
    """
    if config.batch_size < 1:
        raise UserError(f"--batch-size is {config.batch_size}: it must be at least 1")
    split = TokenSplit.open(config.data, config.split)
    device = resolve_device(config.device)
    model = load_model(config.model, "float32", device)
    check_tokenizer(config.model, split)
    window = config.window_tokens or trained_window(config.model) or DEFAULT_WINDOW_TOKENS
    if window < 1:
        raise UserError(f"--window-tokens is {window}: it must be at least 1")
    started = time.perf_counter()
    nats = score_split(model, split, window, config.batch_size)
    seconds = time.perf_counter() - started
    if not np.isfinite(nats).all():
        raise UserError(
            f"model {config.model} gives {(~np.isfinite(nats)).sum()} non-finite scores"
        )
    tokens = split.read(0, split.tokens)
    unigram = unigram_nats(TokenSplit.open(config.data, "train"), tokens)
    mean = float(nats.mean(dtype=np.float64))
    text = (split.eos_token_id, split.utf8_bytes)
    result = {
        "model": config.model,
        "data": config.data,
        "split": config.split,
        "parameters": sum(p.numel() for p in model.parameters()),
        "window_tokens": window,
        "tokens": split.tokens,
        "documents": split.documents,
        "utf8_bytes": split.utf8_bytes,
        "nats_per_token": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": bits_per_byte(nats, tokens, *text),
        "unigram_bits_per_byte": bits_per_byte(unigram, tokens, *text),
        "tokens_per_s": split.tokens / seconds,
        "tokenizer_sha256": split.manifest.tokenizer.sha256,
        "versions": versions(),
    }
    _print_result(result)
    return result


def check_tokenizer(model_dir: str, split: TokenSplit) -> None:
    """Refuse token files that were made with another tokenizer than the model's."""
    own = tokenizer_sha256(load_model_tokenizer(model_dir))
    theirs = split.manifest.tokenizer.sha256
    if own != theirs:
        raise UserError(
            f"the tokenizer of {model_dir} (sha256 {own[:12]}) is not the one that made the token "
            f"files ({theirs[:12]})"
        )


def trained_window(model_dir: str) -> int | None:
    """The window a checkpoint was trained with, if it says so."""
    path = Path(model_dir) / "training" / "progress.json"
    if not path.exists():
        return None
    return json.loads(path.read_text())["settings"]["data.window_tokens"]


def _print_result(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']} on {result['split']} of {result['data']}")
    for name, justify in (("measure", "left"), ("value", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_row("tokens scored", f"{result['tokens']:,}")
    table.add_row("bytes of text", f"{result['utf8_bytes']:,}")
    table.add_row(
        f"perplexity, windows of {result['window_tokens']}", f"{result['perplexity']:.3f}"
    )
    table.add_row("nats per token", f"{result['nats_per_token']:.4f}")
    table.add_row("bits per byte", f"{result['bits_per_byte']:.4f}")
    table.add_row("bits per byte, unigram model", f"{result['unigram_bits_per_byte']:.4f}")
    table.add_row("tokens per second", f"{result['tokens_per_s']:,.0f}")
    Console().print(table)
    print(json.dumps(result))
