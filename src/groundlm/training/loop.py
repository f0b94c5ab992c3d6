"""The training loop: plain PyTorch, whose every step is a pure function of the one before."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from groundlm.data.windows import StreamWindows, TokenSplit, TrainingWindows
from groundlm.errors import RunFault, UserError
from groundlm.evaluation.perplexity import heldout_nats
from groundlm.model.loading import load_model
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.state import GPNState
from groundlm.models import (
    build_model,
    load_model_tokenizer,
    resolve_device,
    versions,
)
from groundlm.training import checkpoint as ckpt
from groundlm.training.config import TrainConfig
from groundlm.training.distributed import Ranks
from groundlm.training.metrics import MetricsFile, ProgressLine
from groundlm.training.optim import Optimizers, WeightAverage, learning_rate
from groundlm.training.probe import probe
from groundlm.training.step import BatchGradient
from groundlm.training.trackers import TRACKERS


def run_train(config: TrainConfig) -> dict[str, Any]:
    """Train, or go on with the run in `training.out`; under torchrun, as one of its ranks.

    Returns the figures of the last step: `run`, `checkpoint`, `step`, `tokens`, `train_seconds`,
    `tokens_per_s`, `heldout_nats_per_token` (None without a held-out split), `skipped_steps`,
    `interrupted_by` (a signal number or None).

    Raises:
        UserError: settings, data or an existing run that do not fit; the run stays as it was.
        RunFault: the disk takes no more, or the loss stays non-finite; good checkpoints stay.
    """
    config.check()
    ranks = Ranks.join(config.training.device)
    try:
        run = Run(config, ranks)
        if run.step >= run.last_step:
            run.say(f"{run.folder} already stands at step {run.step} of {config.training.steps}")
            return run.figures
        return run.train()
    finally:
        ranks.leave()


class Run:
    """One run: data, model, optimizer, and the step it stands at."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        self.config, self.ranks, t = config, ranks, config.training
        self.folder = Path(t.out)
        self.last_step = min(t.steps, t.stop_at or t.steps)
        self.split = TokenSplit.open(config.data.path, "train")
        self.heldout = None
        if "heldout" in self.split.manifest.splits:
            self.heldout = TokenSplit.open(config.data.path, "heldout")
        kind = StreamWindows if t.carry_state else TrainingWindows
        self.windows = kind(self.split, config.data.window_tokens, t.batch_size, t.seed)
        self.sizes = model_sizes(config, self.split)
        self.settings = run_settings(config, self.sizes, ranks.world)
        self.tokenizer = load_model_tokenizer(Path(config.data.path, "tokenizer"))
        newest = self._checkpoint_to_continue()
        self.figures: dict[str, Any] = {
            "run": str(self.folder),
            "checkpoint": None if newest is None else str(newest),
            "step": 0,
            "tokens": 0,
            "train_seconds": 0.0,
            "tokens_per_s": None,
            "heldout_nats_per_token": None,
            "best_heldout_nats_per_token": None,
            "best_step": None,
            "skipped_steps": 0,
            "skipped_in_a_row": 0,
            "interrupted_by": None,
        }
        self.model = (
            build_model(self.sizes, t.seed) if newest is None else load_model(newest, "float32")
        )
        self.model.to(ranks.device(resolve_device(t.device))).train()
        if isinstance(self.model, GPNForCausalLM):
            self.model.scan_backend = t.scan_backend
        self.optimizers = Optimizers(self.model, config.optimizer)
        self.average = WeightAverage(self.model, t.ema_decay) if t.ema_decay else None
        self.gradient = BatchGradient(config, self.model, self.windows, ranks)
        if newest is not None:
            self._restore(newest)

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self.figures["step"]

    def say(self, text: str) -> None:
        """Tell the person watching, once for all ranks."""
        if self.ranks.is_writer:
            print(text, flush=True)

    def _checkpoint_to_continue(self) -> Path | None:
        """The newest whole checkpoint; refuses a run that was made with other settings."""
        newest = ckpt.newest_complete(self.folder, self.say)
        if newest is None:
            foreign = self.folder.exists() and any(self.folder.iterdir())
            if foreign and not (self.folder / "config.yaml").exists():
                raise UserError(f"{self.folder} is not empty and holds no run")
            return None
        old = ckpt.read_progress(newest)["settings"]
        grouping = {"training.micro_batch_size", "training.ranks"}
        for name in sorted(old.keys() | self.settings.keys()):
            if name in grouping and self.config.training.regroup:
                continue
            if old.get(name) != self.settings.get(name):
                raise UserError(
                    f"{self.folder} was trained with {name} = {old.get(name)}, not "
                    f"{self.settings.get(name)}: continue it unchanged or choose another "
                    "--training.out"
                )
        return newest

    def _restore(self, newest: Path) -> None:
        """Optimizer, average, carried state and figures as they were at the checkpoint."""
        extra = newest / "training"
        path = extra / "optimizer.safetensors"
        self.optimizers.load_tensors(ckpt.read_tensors(path), str(path))
        if self.average is not None:
            saved = ckpt.read_tensors(newest / "ema" / "model.safetensors")
            for name, tensor in self.average.average.items():
                tensor.copy_(saved[name])
        if self.config.training.carry_state:
            rows = self.ranks.share(self.config.training.batch_size)
            state = GPNState.load(extra / "state.safetensors", device=self.gradient.device)
            self.gradient.carried = state.rows(slice(rows.start, rows.stop))
        self.figures |= ckpt.read_progress(newest)["figures"]
        self.figures |= {"run": str(self.folder), "checkpoint": str(newest)}

    def train(self) -> dict[str, Any]:
        """Run to the last step; a SIGINT or SIGTERM ends it after the current step, saved."""
        t = self.config.training
        with ExitStack() as stack:
            self.reporter = stack.enter_context(Reporter(self))
            signals = stack.enter_context(_Signals())
            clock = _Clock()
            while self.step < self.last_step:
                self._one_step(clock)
                caught = self.ranks.largest(signals.caught, self.gradient.device)
                done = self.step >= self.last_step
                if done or (t.eval_every and self.step % t.eval_every == 0):
                    self._evaluate()
                if done or caught or self.step % t.save_every == 0:
                    self._save()
                if caught:
                    self.figures["interrupted_by"] = caught
                    break
                clock.restart()
        return self.figures

    def _one_step(self, clock: _Clock) -> None:
        t, f = self.config.training, self.figures
        rate = learning_rate(self.step, t.steps, self.config.optimizer)
        loss = self.gradient.add(self.step)
        norm = self.optimizers.step(rate) if math.isfinite(loss) else math.nan
        skipped = not math.isfinite(norm)
        if skipped:
            self.optimizers.clear()
        elif self.average is not None:
            self.average.update()
        f["step"] += 1
        f["tokens"] += self.windows.batch_tokens
        f["train_seconds"] += clock.lap_s()
        f["tokens_per_s"] = f["tokens"] / f["train_seconds"]
        f["skipped_steps"] += skipped
        f["skipped_in_a_row"] = f["skipped_in_a_row"] + 1 if skipped else 0
        self.reporter.step(loss, norm, rate, skipped)
        if f["skipped_in_a_row"] >= t.max_skipped_steps:
            raise RunFault(
                f"loss or gradient not finite in {t.max_skipped_steps} steps in a row, the last "
                f"being step {self.step}; last checkpoint: {f['checkpoint'] or 'none'}"
            )

    def _evaluate(self) -> None:
        """Held-out loss on the first `eval_windows` windows, shared among the ranks."""
        if self.heldout is None:
            return
        record = {"heldout_nats_per_token": self._heldout()}
        if self.average is not None:
            with self.average.applied():
                record["heldout_ema_nats_per_token"] = self._heldout()
        nats = record["heldout_nats_per_token"]
        self.figures |= {"heldout_nats_per_token": nats, "heldout_step": self.step}
        self.reporter.record(record)
        self.reporter.tell(f"step {self.step}  held-out {nats:.4f} nats per token")

    def _heldout(self) -> float:
        assert self.heldout is not None
        t, window = self.config.training, self.config.data.window_tokens
        rows, part = t.micro_batch_size or t.batch_size, (self.ranks.rank, self.ranks.world)
        own = heldout_nats(self.model, self.heldout, window, rows, t.eval_windows, part)
        both = torch.tensor(own, dtype=torch.float64, device=self.gradient.device)
        nats, tokens = self.ranks.sum(both).tolist()
        return nats / tokens

    def _save(self) -> None:
        """One rank writes; what was there before goes only when the new checkpoint is whole."""
        t, f = self.config.training, self.figures
        state = self.gradient.carried
        if state is not None:
            state = state.map(self.ranks.gather_rows)
        best = f["best_heldout_nats_per_token"]
        nats = f["heldout_nats_per_token"] if f.get("heldout_step") == self.step else None
        if nats is not None and (best is None or nats < best):
            f |= {"best_heldout_nats_per_token": nats, "best_step": self.step}
        f["checkpoint"] = str(ckpt.path_of(self.folder, self.step))
        progress = {"step": self.step, "figures": f, "settings": self.settings}
        progress["versions"] = versions()
        if self.ranks.is_writer:
            fill = partial(self._fill_checkpoint, state=state)
            ckpt.write(self.folder, self.step, fill, progress)
            best_step = f["best_step"] if t.keep_best else None
            ckpt.rotate(self.folder, t.keep_checkpoints, t.keep_every, best_step)
        self.ranks.wait()

    def _fill_checkpoint(self, folder: Path, state: GPNState | None) -> None:
        save_file(self.optimizers.tensors(), folder / "training" / "optimizer.safetensors")
        if state is not None:
            state.save(folder / "training" / "state.safetensors")
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.average is not None:
            with self.average.applied():
                self.model.save_pretrained(folder / "ema")
            self.tokenizer.save_pretrained(folder / "ema")

    def headline(self) -> str:
        """What is about to be trained, in one line."""
        count = sum(p.numel() for p in self.optimizers.parameters)
        t, tokens = self.config.training, self.split.tokens
        backend = getattr(self.model, "scan_backend", None)
        return (
            f"{count:,} parameters, {t.steps} steps of {t.batch_size} x "
            f"{self.config.data.window_tokens} tokens, "
            f"{t.steps * self.windows.batch_tokens / tokens:.2f} passes over {tokens:,} tokens"
            + (f", scan {backend}" if backend else "")
            + (f", {self.ranks.world} ranks" if self.ranks.world > 1 else "")
        )


class Reporter:
    """Writes metrics and shows progress; on ranks other than the first it does neither."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Reporter:
        run, t = self._run, self._run.config.training
        if not run.ranks.is_writer:
            return self
        resolved = json.loads(json.dumps(asdict(run.config) | {"model": run.sizes}))
        self._tracker = TRACKERS[t.log](run.folder, resolved)
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))
            self._metrics = MetricsFile(run.folder / "metrics.jsonl", run.step)
        except OSError as error:
            raise RunFault(f"{run.folder} cannot be written: {error}") from None
        self._display = ProgressLine(run.step, run.last_step)
        if run.step:
            self.tell(f"continuing {run.folder} from step {run.step}")
        self.tell(run.headline())
        return self

    def __exit__(self, *exc: object) -> None:
        if self._run.ranks.is_writer:
            self._display.close()
            self._metrics.close()
            self._tracker.close()

    def step(self, loss: float, norm: float, rate: float, skipped: bool) -> None:
        """Report the step just done: always on the bar, every `log_every` steps in the file."""
        run, f = self._run, self._run.figures
        if not run.ranks.is_writer:
            return
        due = run.step % run.config.training.log_every == 0 or run.step == run.last_step
        if due or skipped:
            figures: dict[str, Any] = {
                "loss_nats": None if skipped else loss,
                "learning_rate": rate,
                "grad_norm": None if skipped else norm,
                "tokens": f["tokens"],
                "tokens_per_s": round(f["tokens_per_s"], 1),
                "elapsed_s": round(f["train_seconds"], 3),
                "skipped_steps": f["skipped_steps"],
            }
            if isinstance(run.model, GPNForCausalLM) and not skipped:
                figures |= probe(run.model.model, run.gradient.inputs(run.step - 1))
            self.record(figures)
        note = f"loss {loss:.4f}  {f['tokens_per_s']:,.0f} tokens/s  lr {rate:.2e}"
        if f["skipped_steps"]:
            note += f"  {f['skipped_steps']} skipped"
        self._display.step(run.step, note, due)

    def record(self, figures: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and the tracker's record."""
        if self._run.ranks.is_writer:
            record = {"step": self._run.step, **figures}
            try:
                self._metrics.write(record)
            except OSError as error:
                raise RunFault(f"metrics.jsonl cannot be written: {error}") from None
            self._tracker.write(record)

    def tell(self, text: str) -> None:
        """One line for the person watching."""
        if self._run.ranks.is_writer:
            self._display.say(text)


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


def run_settings(config: TrainConfig, sizes: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Flat `section.field` -> value of all that decides the numbers of a run."""
    manifest = Path(config.data.path, "manifest.json").read_bytes()
    settings = config.fixed() | {"data.sha256": hashlib.sha256(manifest).hexdigest()}
    settings |= {f"model.{name}": value for name, value in sizes.items()}
    return settings | {"training.ranks": ranks}


class _Clock:
    """Seconds spent training, evaluation and saving left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()

    def lap_s(self) -> float:
        spent = time.perf_counter() - self._since
        self.restart()
        return spent


class _Signals:
    """Remembers the first SIGINT or SIGTERM; a second one interrupts at once."""

    def __init__(self) -> None:
        self.caught = 0
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
