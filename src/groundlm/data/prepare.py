"""`groundlm prepare`: text in, shuffled token files of both splits and a manifest out."""

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from groundlm.data.corpora import InputOptions, InputTask, resolve_inputs
from groundlm.data.manifest import Manifest, TokenizerInfo
from groundlm.data.pipeline import Plan, Work, quiet
from groundlm.data.readers import HubReader
from groundlm.data.steps import HELDOUT, TRAIN, Shard, id_type
from groundlm.data.tokenizer import (
    BYTE_ALPHABET_SIZE,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)
from groundlm.data.workfolder import finish, reusable, work_folder
from groundlm.errors import UserError

# Each shard leaves a token file per split, and the merge opens all of a split at once.
MAX_SHARDS = 256
TRAIN_TOKENIZER = "train:"


@dataclass(frozen=True)
class PrepareConfig:
    """What to make token data from, and how. Neither `out` nor `workers` changes a byte of it."""

    input: list[str]
    """Where the text is: `pydocs` (English documentation that ships inside Python, 2.5 MB), a
    file or folder of Parquet, JSONL (plain, .gz, .zst) or plain text, or `owner/name` of a data
    set on the Hugging Face hub. Several are read in order."""

    out: str
    """Folder to make. One made by the same request is reused; nothing is ever overwritten."""

    tokenizer: str = "train:4096"
    """Tokenizer folder, tokenizer.json, hub name, or `train:N`: a byte-level BPE tokenizer of N
    entries, trained on the train split of the input (its first 1e9 bytes of text at most)."""

    heldout_input: list[str] = field(default_factory=list)
    """Input whose documents form the held-out split; heldout_share then does not apply."""

    heldout_share: float = 0.05
    """Share of the documents (0 <= share < 1) held out, chosen by a hash of seed and text, so
    that equal documents are never on both sides. 0: no held-out split."""

    seed: int = 1
    """Seed (>= 0) of the choice of held-out documents and of the order of documents."""

    text_key: str = "text"
    """Field or column of a record that holds its text."""

    subset: str | None = None
    """Configuration of a hub data set, such as `sample-10BT`."""

    split: str = "train"
    """Split of a hub data set to read."""

    document_separator: str | None = None
    r"""String between the documents of a plain text file, such as `<|endoftext|>` or `\n\n\n`
    (`\n`, `\r`, `\t` are understood). None: a file is one document."""

    eos_token: str | None = None
    """End-of-sequence token put after every document. None: the tokenizer's own."""

    limit_documents: int | None = None
    """Read only so many documents of `input` (in its order, then as one task). None: all."""

    workers: int = 1
    """Processes that tokenise, each a file (or hub shard) at a time."""


def prepare(config: PrepareConfig) -> Manifest:
    """Make the token data folder `config.out`: `train/`, `heldout/`, `tokenizer/`, manifest.json.

    Work is done in `<out>.partial`, which appears as `<out>` when complete; run again after an
    interruption, the same request continues there. Progress and a summary go to stderr.

    Raises UserError for every mistake of the user's; `<out>.partial` is then removed.
    """
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    check(config)
    out = Path(config.out)
    loaded = None
    if not config.tokenizer.startswith(TRAIN_TOKENIZER):
        loaded = load_tokenizer(config.tokenizer, config.eos_token)
    plan = make_plan(config)
    request_sha256 = fingerprint(config, plan, loaded)
    if found := reusable(out, request_sha256):
        console.print(f"{out}: made by the same request before, reused", markup=False)
        return found
    with work_folder(out, {"request": request_sha256, **versions()}) as folder:
        work = Work(folder, plan)
        with console.status(work), quiet(folder):
            tokenizer = loaded or work.train_tokenizer(trained_size(config.tokenizer))
            tokens_per_s = work.tokenise(tokenizer)
            tally = work.tally()
            splits = {split: work.merge(split, tally) for split in plan.splits}
            tokenizer.save_pretrained(str(folder / "tokenizer"))
        manifest = Manifest(
            tokenizer=tokenizer_info(config, tokenizer),
            dtype=id_type(vocabulary_size(tokenizer)).name,
            vocab_size=vocabulary_size(tokenizer),
            seed=config.seed,
            source=source(config),
            splits=splits,
            dropped=dict(sorted(tally.dropped.items())),
            request_sha256=request_sha256,
            versions=versions(),
        )
        finish(folder, out, manifest)
    console.print(f"{out}: {summary(manifest)}; {tokens_per_s:,.0f} tokens/s", markup=False)
    return manifest


def check(config: PrepareConfig) -> None:
    """Raise UserError for values that no input could make right."""
    if not config.input:
        raise UserError("--input names nothing")
    if not 0 <= config.heldout_share < 1:
        raise UserError(f"--heldout-share {config.heldout_share} is not in [0, 1)")
    if config.seed < 0:
        raise UserError(f"--seed {config.seed} is negative")
    if config.workers < 1:
        raise UserError(f"--workers {config.workers} is less than 1")
    if config.limit_documents is not None and config.limit_documents < 1:
        raise UserError(f"--limit-documents {config.limit_documents} is less than 1")
    if config.document_separator == "":
        raise UserError("--document-separator is empty")
    if config.tokenizer.startswith(TRAIN_TOKENIZER):
        if config.eos_token is not None:
            raise UserError("--eos-token does not apply to a tokenizer that is trained here")
        trained_size(config.tokenizer)


def trained_size(tokenizer: str) -> int:
    """N of `train:N`; UserError if it is no number or too small."""
    number = tokenizer.removeprefix(TRAIN_TOKENIZER)
    if not number.isdecimal() or int(number) <= BYTE_ALPHABET_SIZE:
        raise UserError(
            f"--tokenizer '{tokenizer}': N of train:N is a number of entries, at least "
            f"{BYTE_ALPHABET_SIZE + 1}"
        )
    return int(number)


def make_plan(config: PrepareConfig) -> Plan:
    """Shards to read. They depend on the input alone, so that workers change nothing.

    Raises UserError for unusable input, and for input on both sides of the split.
    """
    options = InputOptions(config.text_key, config.subset, config.split, config.document_separator)
    tasks = resolve_inputs(config.input, options)
    heldout_tasks = resolve_inputs(config.heldout_input, options)
    on_hub = any(isinstance(task.reader, HubReader) for task in tasks + heldout_tasks)
    if config.subset is not None and not on_hub:
        raise UserError(f"--subset '{config.subset}' is for hub data sets, and no input is one")
    on_both_sides = {task.content for task in tasks} & {task.content for task in heldout_tasks}
    if on_both_sides:
        raise UserError(f"'{min(on_both_sides)}' is in both --input and --heldout-input")
    by_document = not config.heldout_input and config.heldout_share > 0
    shards = make_shards(tasks, None if by_document else TRAIN, config.limit_documents)
    return Plan(
        shards=shards + make_shards(heldout_tasks, HELDOUT, None),
        splits=(TRAIN, HELDOUT) if by_document or heldout_tasks else (TRAIN,),
        inputs={TRAIN: config.input, HELDOUT: config.heldout_input or config.input},
        text_key=config.text_key,
        seed=config.seed,
        heldout_share=config.heldout_share,
        workers=config.workers,
    )


def make_shards(tasks: list[InputTask], split: str | None, limit: int | None) -> list[Shard]:
    """Neighbouring tasks in at most MAX_SHARDS shards, or in one that can count to the limit."""
    count = min(len(tasks), MAX_SHARDS if limit is None else 1)
    bounds = [index * len(tasks) // count for index in range(count + 1)] if count else []
    return [Shard(tuple(tasks[start:end]), split, limit) for start, end in pairwise(bounds)]


def source(config: PrepareConfig) -> dict[str, Any]:
    """What the user asked for, without what has a place of its own or changes nothing."""
    elsewhere = {"out", "workers", "seed", "tokenizer", "eos_token"}
    asked = {key: value for key, value in asdict(config).items() if key not in elsewhere}
    return asked | ({"heldout_share": None} if config.heldout_input else {})


def fingerprint(
    config: PrepareConfig, plan: Plan, tokenizer: PreTrainedTokenizerFast | None
) -> str:
    """Hex SHA-256 of everything that the token data depends on."""
    request = {
        "source": source(config),
        "seed": config.seed,
        "tokenizer": tokenizer_sha256(tokenizer) if tokenizer else config.tokenizer,
        "eos_token": tokenizer.eos_token if tokenizer else None,
        "shards": [
            [f"{task.content} {task.rank}/{task.world_size}" for task in shard.tasks]
            for shard in plan.shards
        ],
    }
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what decides the bytes; NumPy shuffles for datatrove."""
    packages = ("groundlm", "datatrove", "tokenizers", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def tokenizer_info(config: PrepareConfig, tokenizer: PreTrainedTokenizerFast) -> TokenizerInfo:
    return TokenizerInfo(
        source=config.tokenizer,
        sha256=tokenizer_sha256(tokenizer),
        vocab_size=vocabulary_size(tokenizer),
        eos_token=tokenizer.eos_token,
        eos_token_id=tokenizer.convert_tokens_to_ids(tokenizer.eos_token),
    )


def summary(manifest: Manifest) -> str:
    """Counts of the splits and of what was dropped, in one line."""
    parts = [
        f"{name} {split.tokens:,} tokens, {split.documents:,} documents, "
        f"{split.utf8_bytes:,} bytes of text"
        for name, split in manifest.splits.items()
    ]
    parts += [f"{count:,} dropped ({reason})" for reason, count in manifest.dropped.items()]
    return "; ".join(parts)
