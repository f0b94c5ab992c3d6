"""`groundlm quickstart`: from nothing to a scored model that writes, on the built-in corpus."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from groundlm.analysis.command import AnalyzeConfig, run_analyze
from groundlm.analysis.source import default_out
from groundlm.cli import parse
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.evaluation.command import EvalConfig, run_eval
from groundlm.generation import GenerateConfig, run_generate
from groundlm.training.config import DataConfig, TrainConfig
from groundlm.training.loop import run_train


@dataclass(frozen=True)
class QuickstartConfig:
    """Prepare the built-in corpus, train a small GPN+M, score it, let it write, look inside it.

    Run again, it reuses what is there and goes on where it stopped; nothing is overwritten.
    """

    data: str = "data/pydocs"
    """Folder of the token files."""
    run: str = "runs/quickstart"
    """Folder of the training run."""
    config: str = "quickstart"
    """Preset or YAML file of the training run."""
    tokenizer: str = "train:4096"
    """Tokenizer, as for `groundlm prepare`."""
    prompt: str = "Return a list of"
    """What the sample goes on from."""
    max_new_tokens: int = 60
    """Length of the sample in tokens."""


def run_quickstart(config: QuickstartConfig) -> int:
    """Run the steps; the last line of stdout is the result as JSON.

    Returns 0, or 128 + the number of the signal that stopped the training.
    """
    started = time.perf_counter()
    _say(f"1/5 prepare: the documentation inside this Python -> {config.data}")
    prepare(PrepareConfig(input=["pydocs"], out=config.data, tokenizer=config.tokenizer))
    _say(f"2/5 train -> {config.run}")
    train: TrainConfig = parse(TrainConfig, ["--config", config.config], "train", uses_presets=True)
    train = replace(
        train,
        data=DataConfig(config.data, train.data.window_tokens),
        training=replace(train.training, out=config.run),
    )
    figures = run_train(train)
    if figures["interrupted_by"]:
        _say(f"training was stopped at step {figures['step']}: run it again to go on")
        return 128 + figures["interrupted_by"]
    _say("3/5 evaluate on held-out text")
    scores = run_eval(EvalConfig(figures["checkpoint"], config.data))
    _say("4/5 sample")
    run_generate(
        GenerateConfig(
            model=figures["checkpoint"],
            prompt=config.prompt,
            max_new_tokens=config.max_new_tokens,
            seed=1,
        )
    )
    print()
    _say("5/5 look inside")
    report = default_out(None, figures["checkpoint"]) / "report.html"
    if not report.is_file():
        run_analyze(AnalyzeConfig(figures["checkpoint"], config.data))
    _say(f"token files   {config.data}")
    _say(f"run           {config.run} (config.yaml, metrics.jsonl, checkpoints/)")
    _say(f"model         {figures['checkpoint']}")
    _say(f"report        {report} (open it in a browser)")
    result = {
        "heldout_bits_per_byte": scores["bits_per_byte"],
        "unigram_bits_per_byte": scores["unigram_bits_per_byte"],
        "heldout_perplexity": scores["perplexity"],
        "tokens": figures["tokens"],
        "tokens_per_s": figures["tokens_per_s"],
        "seconds": round(time.perf_counter() - started, 1),
        "run": str(Path(config.run)),
        "report": str(report),
    }
    print(json.dumps(result))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
