"""The learning rate of a model: the best of several on short runs.

What decides is the loss on windows of the training split that the short runs have not read, so that
the held-out text, by which models are compared, has no part in the choice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from groundlm.comparison.config import CompareConfig
from groundlm.comparison.matrix import Model, Run, sweep_folder, sweep_run
from groundlm.comparison.training import settings_of
from groundlm.data.windows import StreamWindows, TokenSplit, TrainingWindows
from groundlm.errors import RunFault, UserError
from groundlm.evaluation import record
from groundlm.evaluation.scoring import evaluating, token_nats
from groundlm.model.loading import load_model
from groundlm.models import resolve_device
from groundlm.training.plot import read_metrics
from groundlm.training.settings import REGROUPED

Outcomes = dict[str, float | None]
OUTCOMES = "nats_per_token_by_settings"


def settle_rate(
    config: CompareConfig,
    model: Model,
    split: TokenSplit,
    train: Callable[[Run], dict[str, Any]],
) -> dict[str, Any]:
    """The model's `learning_rate`, where it is from (`source`), and what was tried (`sweep`).

    `train` takes a run to its end and returns what is known of it. A rate at which the loss is no
    number any more is out. What each rate gave is kept in `<model>.json` beside the short runs,
    which are not needed any more then.

    Raises `RunFault` when no rate can be trained with, or a run fails for another reason.
    """
    if model.config.learning_rate is not None:
        return {"learning_rate": model.config.learning_rate, "source": "own", "sweep": None}
    if not config.sweep.learning_rates:
        return {"learning_rate": config.optimizer.learning_rate, "source": "shared", "sweep": None}
    tried: dict[float, float | None] = {}
    for rate in config.sweep.learning_rates:
        tried[rate] = _outcome(config, sweep_run(config, model, rate), split, train)
    for _ in range(config.sweep.extend):
        further = _beyond_edge(tried)
        if further is None:
            break
        tried[further] = _outcome(config, sweep_run(config, model, further), split, train)
    best = _best(tried)
    if best is None:
        raise RunFault(f"no learning rate of the sweep gives a finite loss ({_listed(tried)})")
    return {
        "learning_rate": best,
        "source": "sweep",
        "sweep": {
            "steps": config.sweep.steps,
            "windows": _unread_batches(config) * config.training.batch_size,
            "seed": config.seeds[0],
            "tried": [
                {"learning_rate": rate, "unread_nats_per_token": nats}
                for rate, nats in sorted(tried.items())
            ],
            "at_edge": len(tried) > 1 and best in (min(tried), max(tried)),
        },
    }


def check_room(config: CompareConfig, split: TokenSplit) -> None:
    """Raise `UserError` if short runs read so much that nothing unread is left to decide on."""
    if not config.sweep.learning_rates:
        return
    batch, window = config.training.batch_size, config.data.window_tokens
    batches = (split.tokens - 1) // window // batch
    wanted = _unread_batches(config)
    if config.sweep.steps + wanted > batches:
        raise UserError(
            f"sweep.steps is {config.sweep.steps}: with {wanted} more batches, unread, to decide "
            f"on, that is more than the {batches} of the training split"
        )


def _best(tried: dict[float, float | None]) -> float | None:
    finite = {rate: nats for rate, nats in tried.items() if nats is not None}
    return min(finite, key=lambda rate: finite[rate]) if finite else None


def _beyond_edge(tried: dict[float, float | None]) -> float | None:
    """The next rate on the side of the best one, if that is the outermost; three digits of it."""
    rates, best = sorted(tried), _best(tried)
    if best == rates[0]:
        return float(f"{rates[0] * rates[0] / rates[1]:.3g}")
    if best == rates[-1]:
        return float(f"{rates[-1] * rates[-1] / rates[-2]:.3g}")
    return None


def _listed(tried: dict[float, float | None]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted(tried))


def _outcome(
    config: CompareConfig,
    run: Run,
    split: TokenSplit,
    train: Callable[[Run], dict[str, Any]],
) -> float | None:
    """Nats per token on unread windows after a short run, None if it diverged; kept or made."""
    path = sweep_folder(config) / f"{run.model.name}.json"
    key = _key(config, run, split)
    if (kept := _read(path)) is not None and key in kept:
        return kept[key]
    # Runs of other settings, of a comparison that shares the folder, lie beside.
    folder = f"{run.folder}-{key.split()[1][:8]}"
    run = replace(run, train=replace(run.train, training=replace(run.train.training, out=folder)))
    nats: float | None = None
    try:
        nats = _unread_nats(config, run, train(run)["checkpoint"], split)
    except RunFault:
        if not _diverged(run):
            raise
    found = nats if nats is not None and math.isfinite(nats) else None
    outcomes = (_read(path) or {}) | {key: found}  # read anew: another process may have written
    record.write_json(path, {OUTCOMES: outcomes})
    return found


def _read(path: Path) -> Outcomes | None:
    """The outcomes of a model, None if there are none yet."""
    try:
        return dict(json.loads(path.read_text("utf-8"))[OUTCOMES])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFault(f"{path} does not hold what a sweep gave: move it away") from None


def _key(config: CompareConfig, run: Run, split: TokenSplit) -> str:
    """The rate, and a hash of all else that decides the outcome."""
    settings = {k: v for k, v in settings_of(run, split).items() if k not in REGROUPED}
    text = json.dumps([settings, config.sweep.windows], sort_keys=True)
    rate = run.train.optimizer.learning_rate
    return f"{rate!r} {hashlib.sha256(text.encode()).hexdigest()}"


def _unread_batches(config: CompareConfig) -> int:
    """Batches that decide: whole ones, `sweep.windows` windows at least."""
    return -(-config.sweep.windows // config.training.batch_size)


def _diverged(run: Run) -> bool:
    """Whether the run ended in skipped steps, the loss or gradient being no number."""
    try:
        last = read_metrics(run.folder)[-1]
    except UserError:
        return False
    return "loss_nats" in last and last["loss_nats"] is None


@torch.inference_mode()
def _unread_nats(config: CompareConfig, run: Run, checkpoint: str, split: TokenSplit) -> float:
    """Mean over the last windows of the first pass, which the short run does not come to."""
    t, data = run.train.training, run.train.data
    kind = StreamWindows if t.carry_state else TrainingWindows
    windows = kind(split, data.window_tokens, t.batch_size, t.seed)
    batches = windows.num_windows // t.batch_size
    model = load_model(checkpoint, "float32", resolve_device(t.device))
    total, count = 0.0, 0
    with evaluating(model):
        for step in range(batches - _unread_batches(config), batches):
            inputs_BT, targets_BT = (ids.to(model.device) for ids in windows.batch(step))
            resets_BT = inputs_BT == split.eos_token_id if data.reset_at_documents else None
            nats_BT = token_nats(model, inputs_BT, targets_BT, resets_BT)
            total += float(nats_BT.sum(dtype=torch.float64))
            count += nats_BT.numel()
    return total / count
