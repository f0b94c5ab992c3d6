"""`groundlm compare`: makes the runs one by one, and the table anew after each of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from groundlm.cli import parse
from groundlm.comparison import plots
from groundlm.comparison.config import CompareConfig
from groundlm.comparison.matrix import Model, Run, in_order, make_run, settle_models
from groundlm.comparison.results import summarise
from groundlm.comparison.scoring import Exam, score_run
from groundlm.comparison.sweep import check_room, settle_rate
from groundlm.comparison.table import markdown
from groundlm.comparison.training import (
    Interrupted,
    NotFinished,
    known,
    refuse_other_settings,
    train,
)
from groundlm.data.manifest import MANIFEST_NAME, Manifest
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.data.request import source
from groundlm.data.windows import TokenSplit
from groundlm.errors import RunFault, UserError
from groundlm.evaluation import record
from groundlm.evaluation.lambada import read_passages
from groundlm.model.loading import one_line
from groundlm.models import versions
from groundlm.training.metrics import replace_text
from groundlm.training.runfolder import CONFIG_NAME, check_is_ours, held

Figures = dict[str, Any]

MARK = "# groundlm compare: the configuration of this comparison\n"

__all__ = ["CompareConfig", "run_compare"]


def run_compare(config: CompareConfig) -> int:
    """Make what is missing; the last line of stdout is the table as JSON.

    Returns 0, 128 + the number of the signal that stopped a training, or 3 if a run failed.
    Raises `UserError` for settings, data or runs that do not fit.
    """
    config.check()
    settle_models(config, None)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("start one process; --launcher names what starts several for a training")
    passages = None if config.lambada is None else read_passages(config.lambada)
    refuse_foreign(Path(config.out))
    prepare_data(config)
    comparison = Comparison(config, passages)
    with held(comparison.out, "--out", MARK, "comparison"):
        stopped = comparison.make()
    if stopped:
        say("stopped by a signal; the same command goes on")
        return 128 + stopped
    print(Path(config.out, "table.md").read_text("utf-8"))
    failed = [run for run in comparison.records if run["fault"] is not None]
    summary = {"out": config.out, "failed": len(failed), "table": comparison.rows()}
    print(json.dumps(summary, allow_nan=False))
    return RunFault.exit_code if failed else 0


def refuse_foreign(out: Path) -> None:
    """Refuse, before any work, a folder that holds something else."""
    if out.is_dir():
        check_is_ours(out, MARK, "comparison")
    elif out.exists():
        raise UserError(f"--out {out} is a file")


def prepare_data(config: CompareConfig) -> None:
    """Make the token files where there are none and the configuration says how.

    Files that are there are used; that they were made otherwise is said.
    """
    if not config.prepare:
        return
    arguments = [f"--out={config.data.path}"]
    for name, value in config.prepare.items():
        text = value if isinstance(value, str) and name != "input" else json.dumps(value)
        arguments.append(f"--{name}={text}")
    asked: PrepareConfig = parse(PrepareConfig, arguments, "compare")
    if not Path(config.data.path, MANIFEST_NAME).exists():
        prepare(asked)
        return
    manifest = Manifest.load(config.data.path)
    theirs = manifest.source | {"seed": manifest.seed, "tokenizer": manifest.tokenizer.source}
    ours = source(asked) | {"seed": asked.seed, "tokenizer": asked.tokenizer}
    if other := [name for name in ours if ours[name] != theirs.get(name)]:
        say(
            f"{config.data.path} is there and was not made as prepare says ({other[0]}): used as is"
        )


class Comparison:
    """The runs of a comparison and what is known of each."""

    def __init__(self, config: CompareConfig, passages: list[str] | None) -> None:
        self.config, self.out = config, Path(config.out)
        self.split = TokenSplit.open(config.data.path, "train")
        self.all_models = settle_models(config, self.split.vocab_size)
        self.models = [m for m in self.all_models if not config.only or m.name in config.only]
        check_room(config, self.split)
        self.exam = Exam.of(config, passages)
        self.rates: dict[str, dict[str, Any]] = {}
        self.records = [
            {"model": model.name, "seed": seed, "status": "missing", "fault": None}
            for model, seed in in_order(config, self.models)
        ]
        self.curves: list[dict[str, Any]] = []
        self.positions: list[dict[str, Any]] = []

    def make(self) -> int:
        """Train and score run after run; returns the signal that stopped it, or 0.

        What is finished already is taken up first, so that no table is poorer than the last.
        """
        config = yaml.safe_dump(self.config.as_dict(), sort_keys=False)
        write_text(self.out / CONFIG_NAME, MARK + config)
        entries = list(zip(self.records, in_order(self.config, self.models), strict=True))
        for _, (model, seed) in entries:
            run = make_run(self.config, model, seed, self.config.optimizer.learning_rate)
            refuse_other_settings(run, self.split)
        for entry, (model, seed) in entries:
            with suppress(NotFinished):
                self._fill(entry, model, seed, self._look_up)
        if self.positions:
            self.write()
        for entry, (model, seed) in entries:
            if entry["status"] != "missing":
                continue
            try:
                self._fill(entry, model, seed, self._train)
            except Interrupted as stop:
                return stop.number
            self.write()
        return 0

    def _fill(
        self, entry: dict[str, Any], model: Model, seed: int, train: Callable[[Run], Figures]
    ) -> None:
        """Put a run's record, or why there is none, into its entry."""
        try:
            entry |= self._one(model, seed, train)
        except RunFault as fault:
            entry |= {"status": "failed", "fault": str(fault)}
        if entry["fault"] is not None:
            say(f"{model.name} with seed {seed}: {entry['fault']}")

    def _one(self, model: Model, seed: int, train: Callable[[Run], Figures]) -> dict[str, Any]:
        """One run to its end and its scores, as a record of results.json."""
        rate = self._rate(model, train)
        run = make_run(self.config, model, seed, rate["learning_rate"])
        trained = train(run)
        scores, fault = score_run(run, trained, self.exam)
        named = {"model": model.name, "seed": seed}
        with suppress(UserError):  # a run without its metrics has no curve
            self.curves.append(named | plots.loss_curve(run.folder))
        self.positions.append(named | {"nats": scores["heldout"]["loss_by_position"]})
        return {
            **model.described(),
            "seed": seed,
            "status": "finished",
            "fault": fault,
            "learning_rate": rate["learning_rate"],
            "run": str(run.folder),
            "checkpoint": trained["checkpoint"],
            "tokens": trained["tokens"],
            "seconds": trained["seconds"],
            "tokens_per_s": trained["tokens_per_s"],
            "skipped_steps": trained["skipped_steps"],
            "trained_with": trained["environment"],
            "commit": trained["commit"],
            **{name: value for part in scores.values() for name, value in part["figures"].items()},
            "scored_with": {
                part: {name: made[name] for name in ("seconds", "commit", "versions")}
                for part, made in scores.items()
            },
        }

    def _rate(self, model: Model, train: Callable[[Run], Figures]) -> dict[str, Any]:
        """The model's learning rate, settled once."""
        other = model.config.learning_rate_of
        if other is not None:
            theirs = next(m for m in self.all_models if m.name == other)
            rate = self._rate(theirs, train)["learning_rate"]
            self.rates[model.name] = {"learning_rate": rate, "source": other, "sweep": None}
        elif model.name not in self.rates:
            self.rates[model.name] = settle_rate(self.config, model, self.split, train)
        return self.rates[model.name]

    def _look_up(self, run: Run) -> Figures:
        trained = known(run, self.split)
        if trained is None:
            raise NotFinished(run.name)
        return trained

    def _train(self, run: Run) -> Figures:
        done = sum(entry["status"] == "finished" for entry in self.records)
        say(f"{run.folder} ({done} of {len(self.records)} runs finished)")
        return train(run, self.split, self.config.launcher)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        unknown = {"learning_rate": None, "source": None, "sweep": None}
        models = [m.described() | self.rates.get(m.name, unknown) for m in self.models]
        return summarise(models, self.records, self.config.reference)

    def write(self) -> None:
        """Bring every file up to what is known now."""
        results = self.results()
        record.write_json(self.out / "results.json", results)
        write_text(self.out / "table.md", markdown(results))
        if self.curves:
            record.write_json(self.out / "loss_curves.json", {"runs": self.curves})
            plots.save(plots.draw_loss_curves(self.curves), self.out / "loss_curves.png")
        if self.positions:
            window = self.config.data.window_tokens
            positions = {"window_tokens": window, "runs": self.positions}
            record.write_json(self.out / "loss_by_position.json", positions)
            picture = plots.draw_loss_by_position(self.positions)
            plots.save(picture, self.out / "loss_by_position.png")

    def results(self) -> dict[str, Any]:
        """results.json."""
        config, manifest = self.config, self.split.manifest
        t, window = config.training, config.data.window_tokens
        passages = self.exam.passages
        return {
            "name": self.out.name,
            "reference": config.reference,
            "target_parameters": config.target_parameters,
            "seeds": config.seeds,
            "steps": t.steps,
            "batch_size": t.batch_size,
            "tokens": t.steps * t.batch_size * window,
            "data": {
                "path": config.data.path,
                "tokenizer_sha256": manifest.tokenizer.sha256,
                "vocab_size": manifest.vocab_size,
                "window_tokens": window,
                **{
                    name: {k: getattr(info, k) for k in ("tokens", "documents", "utf8_bytes")}
                    for name, info in manifest.splits.items()
                },
            },
            "lambada": passages and {"source": config.lambada, "passages": len(passages)},
            "table": self.rows(),
            "runs": self.records,
            "sizes": {model.name: model.sizes for model in self.models},
            "commit": record.git_commit(),
            "versions": versions(),
        }


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all; raises `UserError` if it cannot be written."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None


def say(text: str) -> None:
    """Tell the person watching."""
    print(text, file=sys.stderr, flush=True)
