"""The scores of one finished run, kept in its folder and made anew only when something changed."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groundlm.comparison.config import CompareConfig
from groundlm.comparison.matrix import Run
from groundlm.data.tokenizer import load_tokenizer
from groundlm.data.windows import TokenSplit
from groundlm.evaluation import record
from groundlm.evaluation.lambada import read_passages, score_lambada
from groundlm.evaluation.perplexity import bits_per_byte, score_split
from groundlm.evaluation.tally import perplexity_of
from groundlm.model.loading import load_model
from groundlm.models import resolve_device, versions


@dataclass(frozen=True)
class Exam:
    """What every run is scored on."""

    heldout: TokenSplit
    window_tokens: int
    batch_size: int
    device: str
    passages: list[str] | None
    """LAMBADA."""

    @classmethod
    def of(cls, config: CompareConfig) -> Exam:
        """Open the held-out split and the passages; raises `UserError` for what is not there."""
        return cls(
            heldout=TokenSplit.open(config.data.path, "heldout"),
            window_tokens=config.data.window_tokens,
            batch_size=config.eval_batch_size,
            device=config.training.device,
            passages=None if config.lambada is None else read_passages(config.lambada),
        )

    def named(self) -> dict[str, Any]:
        """What decides the scores of a model."""
        passages = None
        if self.passages is not None:
            passages = hashlib.sha256("\n".join(self.passages).encode()).hexdigest()
        return {
            "window_tokens": self.window_tokens,
            "heldout_sha256": self.heldout.info.content_sha256(),
            "lambada_sha256": passages,
        }


def score_run(run: Run, checkpoint: str, exam: Exam) -> dict[str, Any]:
    """Scores of a checkpoint: flat figures, `loss_by_position`, and what computed them.

    Held-out text is read in disjoint windows from the zero state, as the paper does; LAMBADA's
    figures are there if it was asked for. They lie in `eval/compare.json` of the run, with
    LAMBADA's items beside.
    """
    path = run.folder / "eval" / "compare.json"
    of = {"checkpoint": Path(checkpoint).name} | exam.named()
    kept = _read(path)
    if kept is not None and kept.get("of") == of:
        return kept
    record.make_folder_of(path)
    started = time.perf_counter()
    model = load_model(checkpoint, "float32", resolve_device(exam.device))
    nats = score_split(model, exam.heldout, exam.window_tokens, exam.batch_size)
    scores: dict[str, Any] = {"of": of, "figures": heldout_figures(nats, exam.heldout)}
    scores["loss_by_position"] = by_position(nats, exam.window_tokens)
    if exam.passages is not None:
        tokenizer = load_tokenizer(checkpoint)
        lambada = score_lambada(model, tokenizer, exam.passages, exam.batch_size)
        record.write_json_lines(path.with_name("compare.lambada.jsonl"), lambada["items"])
        scores["figures"] |= {
            f"lambada_{protocol}_{score}": lambada[protocol][score]
            for protocol in ("paper", "lm_eval")
            for score in ("accuracy", "perplexity")
        }
    scores |= {
        "scoring_seconds": round(time.perf_counter() - started, 3),
        "commit": record.git_commit(),
        "versions": versions(),
    }
    record.write_json(path, scores)
    return scores


def heldout_figures(nats: np.ndarray, split: TokenSplit) -> dict[str, Any]:
    """Nats per token, perplexity and bits per byte from the nats of every token in order."""
    nats = nats.astype(np.float64)
    is_text = split.read(0, split.tokens) != split.eos_token_id
    per_token = float(nats.mean())
    return {
        "heldout_tokens": len(nats),
        "nats_per_token": per_token,
        "perplexity": perplexity_of(per_token),
        "bits_per_byte": bits_per_byte(float(nats[is_text].sum()), split.utf8_bytes),
    }


def by_position(nats: np.ndarray, window_tokens: int) -> list[float]:
    """Mean nats at each position of a window, first to last, over the windows that are full."""
    full = len(nats) // window_tokens
    rows = nats[: full * window_tokens].astype(np.float64).reshape(full, window_tokens)
    return rows.mean(0).tolist() if full else []


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
