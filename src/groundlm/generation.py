"""`groundlm generate`: continue a text, many texts, or a kept state."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from groundlm.errors import UserError
from groundlm.model.state import GPNState
from groundlm.model.state_file import check_writable
from groundlm.writer import Sampling, Writer, check_unicode

SEEDS = 1 << 64
"""Seeds that torch tells apart."""


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a text with a trained model.

    One prompt is printed as text while it grows; several texts are printed as JSON lines with
    `prompt` and `text`. Speed goes to stderr.
    """

    model: str
    """Folder of the model, with its tokenizer beside the weights."""
    prompt: str = ""
    """Text to continue; empty starts with the tokenizer's BOS token, or else its EOS token. A text
    that begins with a dash is given as --prompt=TEXT."""
    prompts_file: str | None = None
    """File of prompts instead: one a line, or JSON lines with a field `prompt` if it ends in
    .jsonl."""
    max_new_tokens: int = 128
    """Longest continuation, in tokens; 0 prints the prompt back."""
    temperature: float = 1.0
    """Divides the logits before sampling; 0 takes the most likely token each time."""
    top_k: int = 0
    """Sample among the k most likely tokens only; 0, or more than the vocabulary, means all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this share of the probability; 1 means all,
    0 the most likely only."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same texts, for the same prompts in batches of
    the same size (the texts of a batch share one stream of random numbers)."""
    num_samples: int = 1
    """Continuations of each prompt."""
    batch_size: int = 16
    """Texts that are written side by side."""
    state_in: str | None = None
    """State file to go on from (GPN only); its one row serves all prompts, or it has one each."""
    state_out: str | None = None
    """Write the state after each printed text to this file, or with `interactive` the state at the
    end (GPN only)."""
    interactive: bool = False
    """Type, and let the model go on; `:help` lists the commands (GPN only)."""
    dtype: str = "auto"
    """Dtype of the weights: `auto` (as on disk), `float32` or `bfloat16`."""
    device: str = "auto"
    """Where to run: `auto` (a GPU if there is one), `cpu`, `cuda`, ..."""
    scan: str = "auto"
    """Backend that reads prompts: `auto` or a name of `groundlm.ops.BACKENDS`."""

    def __post_init__(self) -> None:
        lowest = {"max_new_tokens": 0, "top_k": 0, "seed": 0, "num_samples": 1, "batch_size": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least {low}")
        if self.seed >= SEEDS:
            raise UserError(f"seed is {self.seed}: it must be below 2^64")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: it must be a number from 0 up")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must lie between 0 and 1")
        check_unicode(self.prompt)
        if self.prompt and self.prompts_file is not None:
            raise UserError("prompt and prompts_file are both given: choose one")
        if self.interactive and self.prompts_file is not None:
            raise UserError("interactive and prompts_file are both given: choose one")
        if self.interactive and self.num_samples > 1:
            raise UserError("interactive and num_samples are both given: choose one")


def run_generate(config: GenerateConfig) -> None:
    """Print continuations to stdout and the speed to stderr.

    Raises:
        UserError: a model, tokenizer, state or prompt file that cannot be used, by name.
    """
    if config.state_out is not None:
        check_writable(config.state_out)
    prompts = [config.prompt]
    if config.prompts_file is not None:
        prompts = list(read_prompts(Path(config.prompts_file)))
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_k, config.top_p)
    writer = Writer.load(config.model, sampling, config.dtype, config.device, config.scan)
    if config.state_in is not None or config.state_out is not None or config.interactive:
        writer.require_state()
    state = None if config.state_in is None else writer.load_state(config.state_in)
    torch.manual_seed(config.seed)
    if config.interactive:
        from groundlm.interactive import Session

        session = Session(writer, state, config.prompt)
        session.run(sys.stdin, sys.stdout)
        if config.state_out is not None:
            writer.save_state(session.present(), config.state_out)
    elif len(prompts) == config.num_samples == 1:
        _write_one(writer, prompts[0], state, config.state_out)
    else:
        _write_many(writer, prompts, state, config)


def read_prompts(path: Path) -> Iterator[str]:
    """Prompts of a text file (one a line, without its line break) or of JSON lines.

    A byte order mark at the start is no part of the first prompt. Raises `UserError` naming the
    file, and the line that holds no `prompt` or none that is valid Unicode.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts file {path} cannot be read: {error}") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"prompts file {path} is empty")
    for number, line in enumerate(lines, 1):
        if path.suffix != ".jsonl":
            yield line.removesuffix("\r")
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise UserError(f"{path} line {number} is no JSON object with a text `prompt`")
        check_unicode(prompt, f"{path} line {number}")
        yield prompt


def _write_one(writer: Writer, prompt: str, state: GPNState | None, state_out: str | None) -> None:
    _check_rows(state, 1)
    sys.stdout.write(prompt)
    began_s = time.perf_counter()
    text = writer.continue_text(prompt, state, stream=sys.stdout, keep_state=state_out is not None)
    elapsed_s = time.perf_counter() - began_s
    sys.stdout.write("\n")
    sys.stdout.flush()
    _report(text.new_tokens, elapsed_s, sys.stderr)
    if state_out is not None:
        writer.save_state(text.state, state_out)


def _write_many(
    writer: Writer, prompts: list[str], state: GPNState | None, config: GenerateConfig
) -> None:
    _check_rows(state, len(prompts))
    jobs = [(p, i) for i, p in enumerate(prompts) for _ in range(config.num_samples)]
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    states, new_tokens, began_s = [], 0, time.perf_counter()
    for first in range(0, len(jobs), config.batch_size):
        chunk = jobs[first : first + config.batch_size]
        start = state
        if state is not None and state.batch_size > 1:
            start = state.rows([i for _, i in chunk])
        texts = writer.continue_batch(
            [p for p, _ in chunk], start, keep_state=config.state_out is not None
        )
        for text in texts:
            line = {"prompt": text.prompt, "text": text.new_text}
            print(json.dumps(line, ensure_ascii=ascii_only))
            new_tokens += text.new_tokens
            states.append(text.state)
    sys.stdout.flush()
    _report(new_tokens, time.perf_counter() - began_s, sys.stderr)
    if config.state_out is not None:
        kept = [s for s in states if s is not None]
        writer.save_state(GPNState.concatenate(kept), config.state_out)


def _check_rows(state: GPNState | None, prompts: int) -> None:
    if state is not None and state.batch_size not in (1, prompts):
        raise UserError(
            f"state_in has {state.batch_size} rows, there are {prompts} prompts: give 1 row, or as "
            "many as prompts"
        )


def _report(new_tokens: int, elapsed_s: float, stream: TextIO) -> None:
    speed = f", {new_tokens / elapsed_s:.1f} tokens/s" if new_tokens else ""
    print(f"{new_tokens} new tokens in {elapsed_s:.2f} s{speed}", file=stream)
