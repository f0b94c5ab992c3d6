"""The scores of one finished run, kept in its folder and made anew only when something changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from groundlm.comparison.config import CompareConfig
from groundlm.comparison.matrix import Run, reading
from groundlm.data.tokenizer import load_tokenizer
from groundlm.data.windows import TokenSplit
from groundlm.errors import RunFault, UserError
from groundlm.evaluation import record
from groundlm.evaluation.corpus import Corpus, score_corpus, split_corpus
from groundlm.evaluation.lambada import score_lambada
from groundlm.evaluation.reading import Reading
from groundlm.evaluation.scoring import check_scorable
from groundlm.evaluation.tally import every_position
from groundlm.model.loading import load_model
from groundlm.models import resolve_device, versions

PARTS = ("heldout", "lambada")
ITEMS_NAME = "compare.lambada.jsonl"
TRAINED = {"step", "tokens", "seconds", "tokens_per_s", "skipped_steps", "settings", "environment",
           "commit", "checkpoint", "checkpoint_sha256"}  # fmt: skip
"""What is kept of a training."""


@dataclass(frozen=True)
class Exam:
    """What every run is scored on."""

    heldout: Corpus
    heldout_sha256: str
    reading: Reading
    batch_size: int
    device: str
    passages: list[str] | None
    """LAMBADA."""

    @classmethod
    def of(cls, config: CompareConfig, passages: list[str] | None) -> Exam:
        """Open the held-out split; raises `UserError` if it is not there."""
        split = TokenSplit.open(config.data.path, "heldout")
        return cls(
            heldout=split_corpus(split, config.data.path, "heldout"),
            heldout_sha256=split.info.content_sha256(),
            reading=reading(config),
            batch_size=config.eval_batch_size,
            device=config.training.device,
            passages=passages,
        )

    def parts(self) -> dict[str, dict[str, Any]]:
        """What decides each part of a model's scores."""
        state = self.reading.policy
        parts: dict[str, dict[str, Any]] = {
            "heldout": {
                "window_tokens": self.reading.window_tokens,
                "state": state,
                "sha256": self.heldout_sha256,
            }
        }
        if self.passages is not None:
            text = json.dumps(self.passages)
            parts["lambada"] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
        return parts


def scores_path(run: Path) -> Path:
    """Where a run's scores lie, with what is known of its training."""
    return run / "eval" / "compare.json"


def read_scores(run: Path) -> dict[str, Any]:
    """What `score_run` kept: `trained` and the parts; those that are damaged are left out."""
    try:
        found = json.loads(scores_path(run).read_text("utf-8"))
        kept = {"trained": found["trained"]}
        if not kept["trained"].keys() >= TRAINED:
            return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    wanted = {"of", "figures", "loss_by_position", "seconds", "commit", "versions"}
    for part in PARTS:
        scores = found.get(part)
        if isinstance(scores, dict) and scores.keys() >= wanted:
            kept[part] = scores
    return kept


def score_run(
    run: Run, trained: dict[str, Any], exam: Exam
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Scores of a run by part, and what kept it from having all of them, or None.

    Parts are `heldout`, and `lambada` if it was asked for. Each has flat `figures`,
    `loss_by_position` (None for LAMBADA), and what computed them: `seconds`, `commit`, `versions`.
    Held-out text is read in disjoint windows from the zero state, as the paper does. `trained` is
    kept with them, so that a scored run needs no checkpoint.

    Raises `RunFault` if there is no score of the held-out text.
    """
    path, wanted = scores_path(run.folder), exam.parts()
    kept = read_scores(run.folder)
    if kept.get("trained", {}).get("checkpoint_sha256") != trained["checkpoint_sha256"]:
        kept = {}
    if trained["checkpoint"] is not None and not path.with_name(ITEMS_NAME).is_file():
        kept.pop("lambada", None)
    missing = [part for part in wanted if kept.get(part, {}).get("of") != wanted[part]]
    fault = None
    if missing:
        record.make_folder_of(path)
        try:
            model = _load(trained, exam)
            for part in missing:
                scores = _made(_SCORERS[part], model, trained, exam, path)
                kept[part] = {"of": wanted[part]} | scores
                record.write_json(path, kept | {"trained": trained})
        except UserError as error:
            fault = f"{run.name} cannot be scored: {error}"
    found = {p: kept[p] for p in wanted if kept.get(p, {}).get("of") == wanted[p]}
    if "heldout" not in found:
        raise RunFault(fault or f"{run.name} has no scores")
    return found, fault


def _load(trained: dict[str, Any], exam: Exam) -> PreTrainedModel:
    if trained["checkpoint"] is None:
        raise UserError("its checkpoint is gone")
    model = load_model(trained["checkpoint"], "float32", resolve_device(exam.device))
    check_scorable(model)
    return model


def _made(
    scorer: Callable[..., dict[str, Any]],
    model: PreTrainedModel,
    trained: dict[str, Any],
    exam: Exam,
    path: Path,
) -> dict[str, Any]:
    started = time.perf_counter()
    scores = scorer(model, trained, exam, path)
    return scores | {
        "seconds": round(time.perf_counter() - started, 3),
        "commit": record.git_commit(),
        "versions": versions(),
    }


def _heldout(
    model: PreTrainedModel, trained: dict[str, Any], exam: Exam, path: Path
) -> dict[str, Any]:
    bands = every_position(exam.reading.window_tokens)
    scores = score_corpus(model, exam.heldout, exam.reading, exam.batch_size, bands)
    names = ("nats_per_token", "nats_per_token_interval", "perplexity", "perplexity_interval",
             "bits_per_byte", "unigram_bits_per_byte")  # fmt: skip
    return {
        "figures": {"heldout_tokens": scores["tokens"]} | {name: scores[name] for name in names},
        "loss_by_position": [band["nats"] for band in scores["loss_by_context"]],
    }


def _lambada(
    model: PreTrainedModel, trained: dict[str, Any], exam: Exam, path: Path
) -> dict[str, Any]:
    tokenizer = load_tokenizer(trained["checkpoint"])
    assert exam.passages is not None
    scores = score_lambada(model, tokenizer, exam.passages, exam.batch_size)
    record.write_json_lines(path.with_name(ITEMS_NAME), scores["items"])
    figures = {
        f"lambada_{protocol}_{score}": scores[protocol][score]
        for protocol in ("paper", "lm_eval")
        for score in ("accuracy", "perplexity")
    }
    return {"figures": figures, "loss_by_position": None}


_SCORERS = dict(zip(PARTS, (_heldout, _lambada), strict=True))
