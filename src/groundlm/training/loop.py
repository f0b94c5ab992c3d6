"""The training loop: plain PyTorch, whose every step is a pure function of the one before."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from torch import Tensor

from groundlm.data.windows import TokenSplit, TrainingWindows
from groundlm.errors import UserError
from groundlm.evaluation.perplexity import heldout_loss
from groundlm.models import (
    build_model,
    load_model,
    load_model_tokenizer,
    resolve_device,
    versions,
)
from groundlm.training import checkpoint as ckpt
from groundlm.training.config import TrainConfig
from groundlm.training.metrics import MetricsFile, ProgressLine
from groundlm.training.optim import apply_step, build_optimizer, learning_rate


def run_train(config: TrainConfig) -> dict[str, Any]:
    """Train, or go on with the run in `training.out`.

    Returns the figures of the last step: `run`, `checkpoint`, `step`, `tokens`, `tokens_per_s`,
    `heldout_nats_per_token` (None without a held-out split), `interrupted_by` (a signal number).

    Raises:
        UserError: settings, data or an existing run that do not fit; the run stays as it was.
    """
    config.check()
    run = Run(config)
    if run.step >= run.last_step:
        print(f"{run.folder} already stands at step {run.step} of {config.training.steps}")
        return run.figures
    return run.train()


class Run:
    """One run: data, model, optimizer, and the step it stands at."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, t = config, config.training
        self.folder = Path(t.out)
        self.last_step = min(t.steps, t.stop_at or t.steps)
        self.split = TokenSplit.open(config.data.path, "train")
        self.heldout = None
        if "heldout" in self.split.manifest.splits:
            self.heldout = TokenSplit.open(config.data.path, "heldout")
        self.windows = TrainingWindows(self.split, config.data.window_tokens, t.batch_size, t.seed)
        self.sizes = model_sizes(config, self.split)
        manifest = Path(config.data.path, "manifest.json").read_bytes()
        self.settings = config.fixed() | {"data.sha256": hashlib.sha256(manifest).hexdigest()}
        self.settings |= {f"model.{name}": value for name, value in self.sizes.items()}
        self.tokenizer = load_model_tokenizer(Path(config.data.path, "tokenizer"))
        newest = self._newest_checkpoint()
        self.figures: dict[str, Any] = {
            "run": str(self.folder),
            "checkpoint": None if newest is None else str(newest),
            "step": 0,
            "tokens": 0,
            "train_seconds": 0.0,
            "tokens_per_s": None,
            "heldout_nats_per_token": None,
            "interrupted_by": None,
        }
        self.model = build_model(self.sizes, t.seed) if newest is None else load_model(newest)
        self.model.to(resolve_device(t.device)).train()
        if hasattr(self.model, "scan_backend"):
            self.model.scan_backend = t.scan_backend
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.model, config.optimizer)
        if newest is not None:
            ckpt.load_training_state(newest, self.model, self.optimizer)
            self.figures |= ckpt.load_progress(newest)["figures"]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.figures["step"]

    def _newest_checkpoint(self) -> Path | None:
        """The checkpoint to go on from; refuses a run that was made with other settings."""
        found = ckpt.checkpoints(self.folder)
        if not found:
            foreign = self.folder.exists() and any(self.folder.iterdir())
            if foreign and not (self.folder / "config.yaml").exists():
                raise UserError(f"{self.folder} is not empty and holds no run")
            return None
        old = ckpt.load_progress(found[-1])["settings"]
        for name in sorted(old.keys() | self.settings.keys()):
            if old.get(name) != self.settings.get(name):
                raise UserError(
                    f"{self.folder} was trained with {name} = {old.get(name)}, not "
                    f"{self.settings.get(name)}: continue it unchanged or choose another "
                    "--training.out"
                )
        return found[-1]

    def train(self) -> dict[str, Any]:
        """Run to the last step; a SIGINT or SIGTERM ends it after the current step, saved."""
        t = self.config.training
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self._resolved(), sort_keys=False))
        metrics = MetricsFile(self.folder / "metrics.jsonl", self.step)
        display = ProgressLine(self.step, self.last_step)
        if self.step:
            display.say(f"continuing {self.folder} from step {self.step}")
        display.say(self._headline())
        clock = _Clock()
        try:
            with _Signals() as signals:
                while self.step < self.last_step and not signals.caught:
                    self._one_step(clock, metrics, display)
                    done = self.step >= self.last_step
                    if done or (t.eval_every and self.step % t.eval_every == 0):
                        self._evaluate(metrics, display)
                    if done or signals.caught or self.step % t.save_every == 0:
                        self._save()
                    clock.restart()
        finally:
            display.close()
            metrics.close()
        self.figures["interrupted_by"] = signals.caught
        return self.figures

    def _one_step(self, clock: _Clock, metrics: MetricsFile, display: ProgressLine) -> None:
        t, o = self.config.training, self.config.optimizer
        rate = learning_rate(self.step, t.steps, o)
        loss = self._gradients(self.step)
        if not math.isfinite(loss):
            raise UserError(self._not_finite("loss", loss))
        norm = apply_step(self.optimizer, self.parameters, rate, o.clip_norm)
        tokens = t.batch_size * self.config.data.window_tokens
        speed = clock.tokens_per_s(tokens)
        f = self.figures
        f["step"] += 1
        f["tokens"] += tokens
        f["train_seconds"] += clock.lap_s
        f["tokens_per_s"] = f["tokens"] / f["train_seconds"]
        report = self.step % t.log_every == 0 or self.step == self.last_step
        if report:
            metrics.write(
                {
                    "step": self.step,
                    "loss_nats": loss,
                    "learning_rate": rate,
                    "grad_norm": norm,
                    "tokens": f["tokens"],
                    "tokens_per_s": round(speed, 1),
                    "elapsed_s": round(f["train_seconds"], 3),
                }
            )
        note = f"loss {loss:.4f}  {speed:,.0f} tokens/s  lr {rate:.2e}"
        display.step(self.step, note, report)

    def _gradients(self, step: int) -> float:
        """Gradients of the batch's mean loss, summed over micro-batches; returns that loss."""
        t = self.config.training
        inputs_BT, targets_BT = self.windows.batch(step)
        rows = t.micro_batch_size or t.batch_size
        device = self.parameters[0].device
        total = torch.zeros((), device=device)
        for inputs, targets in zip(inputs_BT.split(rows), targets_BT.split(rows), strict=True):
            loss = self._loss(inputs.to(device), targets.to(device), targets_BT.numel())
            loss.backward()
            total += loss.detach()
        return float(total)

    def _loss(self, inputs: Tensor, targets: Tensor, num_items: int) -> Tensor:
        """Summed loss of a micro-batch over the number of targets of the whole batch."""
        bf16 = self.config.training.precision == "bf16"
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=bf16):
            return self.model(
                input_ids=inputs,
                labels=targets,
                shift_labels=targets,
                num_items_in_batch=num_items,
                use_cache=False,
            ).loss

    def _evaluate(self, metrics: MetricsFile, display: ProgressLine) -> None:
        if self.heldout is None:
            return
        t = self.config.training
        nats = heldout_loss(
            self.model,
            self.heldout,
            self.config.data.window_tokens,
            t.micro_batch_size or t.batch_size,
            t.eval_windows,
        )
        self.figures["heldout_nats_per_token"] = nats
        metrics.write({"step": self.step, "heldout_nats_per_token": nats})
        display.say(f"step {self.step}  held-out {nats:.4f} nats per token")

    def _save(self) -> None:
        f = self.figures
        f["checkpoint"] = str(ckpt.path_of(self.folder, self.step))
        progress = {"step": self.step, "figures": f, "settings": self.settings}
        progress["versions"] = versions()
        ckpt.save_checkpoint(
            self.folder,
            self.model,
            self.tokenizer,
            self.optimizer,
            progress,
            self.config.training.keep_checkpoints,
        )

    def _resolved(self) -> dict[str, Any]:
        """The whole configuration as it is used, `vocab_size` filled in."""
        return json.loads(json.dumps(asdict(self.config) | {"model": self.sizes}))

    def _headline(self) -> str:
        count = sum(p.numel() for p in self.parameters)
        t, window = self.config.training, self.config.data.window_tokens
        backend = getattr(self.model, "scan_backend", None)
        return (
            f"{count:,} parameters, {t.steps} steps of {t.batch_size} x {window} tokens, "
            f"{t.steps * t.batch_size * window / self.split.tokens:.2f} passes over "
            f"{self.split.tokens:,} tokens" + (f", scan {backend}" if backend else "")
        )

    def _not_finite(self, name: str, value: float) -> str:
        last = self.figures["checkpoint"] or "none"
        return f"{name} is {value} at step {self.step + 1}; last checkpoint: {last}"


def model_sizes(config: TrainConfig, split: TokenSplit) -> dict[str, Any]:
    """The model section with vocabulary and end-of-document token taken from the data.

    Raises `UserError` when a stated vocabulary is not the data's.
    """
    vocab = split.vocab_size
    stated = config.model.get("vocab_size")
    if stated is not None and stated != vocab:
        raise UserError(
            f"model.vocab_size is {stated}, the tokens of {config.data.path} have {vocab}"
        )
    eos = {"eos_token_id": split.eos_token_id}
    return {"model_type": "gpn"} | config.model | {"vocab_size": vocab} | eos


class _Clock:
    """Seconds spent training, evaluation and saving left out."""

    def __init__(self) -> None:
        self.lap_s = 0.0
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def tokens_per_s(self, tokens: int) -> float:
        self.lap_s = time.perf_counter() - self._since
        self.restart()
        return tokens / self.lap_s


class _Signals:
    """Remembers the first SIGINT or SIGTERM; a second one interrupts at once."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number
