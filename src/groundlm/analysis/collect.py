"""One pass over held-out text that keeps what the analyses need, in memory bounded by the sample.

N windows, T tokens of a window, D state, H heads of all layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from groundlm.analysis import default_token, horizons
from groundlm.analysis.taps import listening
from groundlm.errors import UserError
from groundlm.evaluation.reading import TokenStream
from groundlm.evaluation.scoring import evaluating
from groundlm.model.modeling import GPNForCausalLM


@dataclass(frozen=True)
class Collected:
    """What one pass has seen, each array float32 with windows and tokens in front."""

    ids_NT: np.ndarray
    """Tokens read, int64; every window starts from the zero state."""
    states_NTD: np.ndarray
    """Of a GPN s^p after each token; of another model the last layer's output, before the norm that
    the head stands behind."""
    log_decay_NTH: np.ndarray | None = None
    """Log-decay gamma of every head and token, <= 0; None without a memory."""
    beta_NTH: np.ndarray | None = None
    """Write strength in (0, 1)."""
    openness_NT: dict[str, np.ndarray] = field(default_factory=dict)
    """Mean over the state's dimensions of each gate, by the place of its tap."""
    norms_NT: dict[str, np.ndarray] = field(default_factory=dict)
    """Norms of the summands of the state: `carried`, `ffn` and, with a memory, `read`, with the
    layer's number in front (`0.carried`)."""


def sample_windows(stream: TokenStream, states: int, window_tokens: int) -> np.ndarray:
    """Ids of windows spread evenly over a stream, int64 [N, T].

    T is `window_tokens` or, if the stream is shorter, all of it; N * T is at most `states`, but N
    at least 1.

    Raises:
        UserError: numbers below 1.
    """
    if states < 1 or window_tokens < 1:
        raise UserError(
            f"{states} states in windows of {window_tokens} tokens: both must be at least 1"
        )
    length = min(window_tokens, states, stream.tokens)
    count = max(1, min(states // length, stream.tokens // length))
    stride = stream.tokens // count
    return np.stack([stream.read(i * stride, length) for i in range(count)])


@torch.inference_mode()
def collect(model: PreTrainedModel, ids_NT: np.ndarray, batch_size: int = 4) -> Collected:
    """Read windows side by side, each from the zero state, and keep what the analyses need.

    Args:
        model: a GPN, with or without memory, or a Gated DeltaNet; any other causal language model
            gives its states alone.
        ids_NT: int64 [N, T].
        batch_size: windows read at a time; it changes the numbers by rounding only.

    Raises:
        UserError: a state or another value that is not finite.
    """
    windows, tokens = ids_NT.shape
    arrays: dict[str, np.ndarray] = {}

    def keep(rows: slice, name: str, t: int | slice, value: Tensor) -> None:
        if name not in arrays:
            shape = (windows, tokens, *value.shape[1 if isinstance(t, int) else 2 :])
            arrays[name] = np.empty(shape, np.float32)
        arrays[name][rows, t] = value.float().cpu().numpy()

    is_gpn = isinstance(model, GPNForCausalLM)
    with evaluating(model):
        for first in range(0, windows, batch_size):
            rows = slice(first, min(first + batch_size, windows))
            batch_BT = torch.from_numpy(ids_NT[rows]).to(model.device)
            read = _gpn_figures if is_gpn else _layer_figures
            with read(model, partial(keep, rows)):
                model.base_model(input_ids=batch_BT, use_cache=False)
            bad = int((~np.isfinite(arrays["state"][rows]).all(-1)).sum())
            if bad:
                raise UserError(f"{bad} of {batch_BT.numel()} states are not finite")
    for name, values in arrays.items():
        # A decay of -inf forgets everything and is a number; the bound of a float32 sum is not.
        checked = horizons.bounded(values) if name == "write.log_decay" else values
        if not np.isfinite(checked).all():
            raise UserError(f"values of the model at {name.split()[-1]} are not finite")
    return _collected(ids_NT, arrays)


Keep = Callable[[str, int | slice, Tensor], None]


@contextmanager
def _gpn_figures(model: PreTrainedModel, keep: Keep) -> Iterator[None]:
    """Hands over the figures of a GPN step by step."""
    at, rest = -1, torch.empty(0)

    def listen(place: str, value: Tensor) -> None:
        nonlocal at, rest
        layer = place.removeprefix("predict.").rpartition(".")[0]
        if place == "token":
            at += 1
        elif place == "predicted":
            keep("state", at, value)
        elif place in ("write.log_decay", "write.beta"):
            keep(place, at, value)
        elif place.endswith("gate") and not place.endswith("read_gate"):
            keep(f"open {place}", at, value.mean(-1))
        elif place.endswith((".ffn", ".read")):
            keep(f"norm {place.removeprefix('predict.')}", at, _norm(value))
            if place.endswith(".ffn"):
                rest = value
        elif place.endswith(".rest"):
            keep(f"norm {layer}.carried", at, _norm(value - rest))

    with listening(model, "*", listen):
        yield


def _norm(value_BD: Tensor) -> Tensor:
    """In float64, whose squares no float32 overflows."""
    return value_BD.double().norm(dim=-1)


@contextmanager
def _layer_figures(model: PreTrainedModel, keep: Keep) -> Iterator[None]:
    """Hands over the last layer's output, and decay and write strength of the layers of a Gated
    DeltaNet, if there are any."""
    layers: list[Any] = [x for x in model.modules() if isinstance(x, Qwen3NextGatedDeltaNet)]
    found: list[tuple[Tensor, Tensor]] = []

    def listen(layer: Any, _: tuple, mixed_BTX: Tensor, of: Any) -> None:
        heads, groups = of.num_v_heads, of.num_k_heads
        b, a = mixed_BTX.unflatten(-1, (groups, -1)).split(heads // groups, -1)
        rate = F.softplus(a.flatten(-2).float() + of.dt_bias.float())
        found.append((-of.A_log.float().exp() * rate, b.flatten(-2).sigmoid()))

    def before_norm(_: Any, arguments: tuple[Tensor]) -> None:
        keep("state", slice(None), arguments[0])

    def without_norm(_: Any, __: Any, out: Any) -> None:
        keep("state", slice(None), out.last_hidden_state)

    norm = default_token.final_norm(model)
    with ExitStack() as stack:
        if norm is None:
            stack.callback(model.base_model.register_forward_hook(without_norm).remove)
        else:
            stack.callback(norm.register_forward_pre_hook(before_norm).remove)
        for layer in layers:
            hook = layer.in_proj_ba.register_forward_hook(partial(listen, of=layer))
            stack.callback(hook.remove)
        yield
    if found:
        keep("write.log_decay", slice(None), torch.cat([decay for decay, _ in found], -1))
        keep("write.beta", slice(None), torch.cat([beta for _, beta in found], -1))


def _collected(ids_NT: np.ndarray, arrays: dict[str, np.ndarray]) -> Collected:
    def named(prefix: str) -> dict[str, np.ndarray]:
        return {
            k.removeprefix(prefix): v for k, v in sorted(arrays.items()) if k.startswith(prefix)
        }

    return Collected(
        ids_NT,
        arrays["state"],
        arrays.get("write.log_decay"),
        arrays.get("write.beta"),
        named("open "),
        named("norm "),
    )
