"""The training loop: plain PyTorch, whose every step is a pure function of the one before."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from groundlm.allocator import keep_freed_memory
from groundlm.data.info import matching_tokenizer
from groundlm.data.windows import StreamWindows, TokenSplit, TrainingWindows
from groundlm.errors import RunFault, UserError
from groundlm.evaluation import record
from groundlm.evaluation.perplexity import heldout_nats
from groundlm.evaluation.scoring import check_scorable
from groundlm.model.loading import load_model
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.state import GPNState
from groundlm.models import build_model, resolve_device
from groundlm.training import checkpoint as ckpt
from groundlm.training.config import TrainConfig
from groundlm.training.distributed import Ranks
from groundlm.training.optim import Optimizers, WeightAverage, learning_rate
from groundlm.training.probe import probe
from groundlm.training.reporter import Clock, Reporter, Silence
from groundlm.training.runfolder import held
from groundlm.training.settings import environment, model_sizes, refuse_changes, run_settings
from groundlm.training.signals import Signals
from groundlm.training.step import BatchGradient


def run_train(config: TrainConfig) -> dict[str, Any]:
    """Train, or go on with the run in `training.out`; under torchrun, as one of its ranks.

    Returns the figures of the last step: `run`, `checkpoint`, `step`, `tokens`, `train_seconds`,
    `tokens_per_s`, `heldout_nats_per_token` (None without a held-out split), `skipped_steps`,
    `interrupted_by` (a signal number or None).

    Raises:
        UserError: settings, data or an existing run that do not fit; the run stays as it was.
        RunFault: the disk takes no more, or loss or weights stay non-finite; good checkpoints stay.
    """
    ranks = Ranks.join(config.training.device)
    try:
        with ExitStack() as stack:
            with ranks.together():
                config.check()
                if ranks.is_writer:
                    stack.enter_context(held(Path(config.training.out)))
            with ranks.together():
                run = Run(config, ranks)
            if run.step >= run.last_step:
                run.say(
                    f"{run.folder} already stands at step {run.step} of {config.training.steps}"
                )
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
        self.device = ranks.device(resolve_device(t.device))
        if self.device.type == "cpu":
            keep_freed_memory()
        with ranks.together(), ranks.in_turn():
            self._open_data()
        self.sizes = model_sizes(config, self.split)
        self.settings = run_settings(config, self.sizes, self.split, ranks.world, self.device)
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
        self.model: PreTrainedModel = (
            build_model(self.sizes, t.seed) if newest is None else load_model(newest, "float32")
        )
        self.model.to(self.device).train()
        if isinstance(self.model, GPNForCausalLM):
            self.model.scan_backend = t.scan_backend
        with ranks.together():
            check_scorable(self.model)
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

    def _open_data(self) -> None:
        path, t = self.config.data.path, self.config.training
        self.split = TokenSplit.open(path, "train")
        self.heldout = None
        if "heldout" in self.split.manifest.splits:
            self.heldout = TokenSplit.open(path, "heldout")
        self.tokenizer = matching_tokenizer(path, self.split.manifest)
        kind = StreamWindows if t.carry_state else TrainingWindows
        self.windows = kind(self.split, self.config.data.window_tokens, t.batch_size, t.seed)

    def _checkpoint_to_continue(self) -> Path | None:
        """The newest whole checkpoint; refuses a run that was made with other settings."""
        step = 0
        with self.ranks.together():
            if self.ranks.is_writer and ckpt.checkpoints(self.folder):
                whole = ckpt.newest_whole(self.folder, self.say)
                if whole is None:
                    raise UserError(f"{self.folder / 'checkpoints'} holds no undamaged checkpoint")
                step = ckpt.step_of(whole)
        step = self.ranks.largest(step)
        if not step:
            return None
        newest = ckpt.path_of(self.folder, step)
        progress = ckpt.read_progress(newest)
        refuse_changes(
            self.folder, progress["settings"], self.settings, self.config.training.regroup
        )
        now = environment(self.device)
        for name, was in progress["environment"].items():
            if was != now.get(name):
                self.say(f"{name} was {was}, is {now.get(name)}: equal to rounding, not to the bit")
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
            state = GPNState.load(extra / "state.safetensors", device=self.device)
            self.gradient.carried = state.rows(slice(rows.start, rows.stop))
        progress = ckpt.read_progress(newest)
        self.figures |= progress["figures"]
        self.figures |= {"run": str(self.folder), "checkpoint": str(newest)}
        if progress["heldout"] != self._heldout_text():
            self.say("held-out losses are of other text from here on: the best one starts anew")
            names = ("heldout_nats_per_token", "best_heldout_nats_per_token", "best_step")
            self.figures |= dict.fromkeys(names)

    def _heldout_text(self) -> str | None:
        """What held-out losses of this run are of; equal for equal text."""
        if self.heldout is None:
            return None
        return f"{self.heldout.info.content_sha256()} {self.config.training.eval_windows}"

    def train(self) -> dict[str, Any]:
        """Run to the last step; a SIGINT or SIGTERM ends it after the current step, saved."""
        t, f = self.config.training, self.figures
        with ExitStack() as stack:
            with self.ranks.together():
                self.reporter = stack.enter_context(self._reporter())
            if self.step:
                self.reporter.tell(f"continuing {self.folder} from step {self.step}")
            self.reporter.tell(self.headline())
            signals = stack.enter_context(Signals())
            clock, due = Clock(), False
            while self.step < self.last_step:
                self._one_step(clock)
                caught = self.ranks.largest(signals.caught)
                done = self.step >= self.last_step
                if done or (t.eval_every and self.step % t.eval_every == 0):
                    self._evaluate()
                due = due or self.step % t.save_every == 0
                if done or caught or (due and not f["skipped_in_a_row"]):
                    self._save()
                    due = False
                with self.ranks.together():
                    self.reporter.check()
                if caught and not done:
                    f["interrupted_by"] = caught
                    break
                clock.restart()
        return f

    def _reporter(self) -> Silence:
        if not self.ranks.is_writer:
            return Silence()
        config = json.loads(json.dumps(asdict(self.config) | {"model": self.sizes}))
        return Reporter(self.folder, config, self.config.training.log, self.step, self.last_step)

    def _one_step(self, clock: Clock) -> None:
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
        if self.ranks.is_writer:
            self._report(loss, norm, rate, skipped)
        with self.ranks.together():
            if f["skipped_in_a_row"] >= t.max_skipped_steps:
                raise RunFault(
                    f"loss or gradient not finite in {t.max_skipped_steps} steps in a row, the "
                    f"last being step {self.step}; last checkpoint: {f['checkpoint'] or 'none'}"
                )

    def _report(self, loss: float, norm: float, rate: float, skipped: bool) -> None:
        """The step just done: always on the bar, every `log_every` steps in the file."""
        f = self.figures
        due = self.step % self.config.training.log_every == 0 or self.step == self.last_step
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
            if isinstance(self.model, GPNForCausalLM) and not skipped:
                figures |= probe(self.model.model, self.gradient.inputs(self.step - 1))
            self.reporter.record(self.step, figures)
        note = f"loss {loss:.4f}  {f['tokens_per_s']:,.0f} tokens/s  lr {rate:.2e}"
        if f["skipped_steps"]:
            note += f"  {f['skipped_steps']} skipped"
        self.reporter.progress(self.step, note, due)

    def _evaluate(self) -> None:
        """Held-out loss on the first `eval_windows` windows, shared among the ranks."""
        if self.heldout is None:
            return
        nats = self._heldout()
        record = {"heldout_nats_per_token": nats}
        if self.average is not None:
            with self.average.applied():
                record["heldout_ema_nats_per_token"] = self._heldout()
        self.figures["heldout_nats_per_token"] = nats if math.isfinite(nats) else None
        self.figures["heldout_step"] = self.step
        self.reporter.record(self.step, record)
        self.reporter.tell(f"step {self.step}  held-out {nats:.4f} nats per token")

    def _heldout(self) -> float:
        """Nats per token in the precision that the run trains in."""
        assert self.heldout is not None
        t, window = self.config.training, self.config.data.window_tokens
        rows, part = t.micro_batch_size or t.batch_size, (self.ranks.rank, self.ranks.world)
        bf16 = t.precision == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            own = heldout_nats(
                self.model,
                self.heldout,
                window,
                rows,
                t.eval_windows,
                part,
                self.config.data.reset_at_documents,
            )
        both = torch.tensor(own, dtype=torch.float64, device=self.device)
        nats, tokens = self.ranks.sum(both).tolist()
        return nats / tokens

    def _save(self) -> None:
        """One rank writes; what was there before goes only when the new checkpoint is whole.

        While steps are being skipped, the weights may be what is wrong: nothing is removed then.
        """
        t, f = self.config.training, self.figures
        state = self.gradient.carried
        if state is not None:
            state = state.map(self.ranks.gather_rows)
        best = f["best_heldout_nats_per_token"]
        nats = f["heldout_nats_per_token"] if f.get("heldout_step") == self.step else None
        if nats is not None and (best is None or nats < best):
            f |= {"best_heldout_nats_per_token": nats, "best_step": self.step}
        with self.ranks.together():
            if self.ranks.is_writer:
                self._write_checkpoint(state)
                if not f["skipped_in_a_row"]:
                    best_step = f["best_step"] if t.keep_best else None
                    ckpt.rotate(self.folder, t.keep_checkpoints, t.keep_every, best_step)
        f["checkpoint"] = str(ckpt.path_of(self.folder, self.step))

    def _write_checkpoint(self, state: GPNState | None) -> None:
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                raise RunFault(
                    f"weights are not finite after step {self.step} ({name}): not saved; last "
                    f"checkpoint: {self.figures['checkpoint'] or 'none'}"
                )
        progress = {
            "step": self.step,
            "figures": self.figures,
            "settings": self.settings,
            "heldout": self._heldout_text(),
            "environment": environment(self.device),
            "commit": record.git_commit(),
        }
        fill = partial(self._fill_checkpoint, state=state)
        ckpt.write(self.folder, self.step, fill, progress)

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
