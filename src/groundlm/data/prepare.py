"""`groundlm prepare`: text in, shuffled token files of both splits and a manifest out."""

import sys
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from groundlm.data.corpora import InputOptions, InputTask, resolve_inputs
from groundlm.data.manifest import Manifest, TokenizerInfo
from groundlm.data.pipeline import Plan, Work, quiet
from groundlm.data.readers import HubReader
from groundlm.data.request import (
    TRAIN_TOKENIZER,
    PrepareConfig,
    check,
    fingerprint,
    source,
    trained_size,
    versions,
)
from groundlm.data.steps import HELDOUT, TRAIN, Shard, id_type
from groundlm.data.tokenizer import load_tokenizer, tokenizer_sha256, vocabulary_size
from groundlm.data.workfolder import finish, reusable, work_folder
from groundlm.errors import RunFault, UserError

# Each shard leaves a token file per split, and the merge opens all of a split at once.
MAX_SHARDS = 256


def prepare(config: PrepareConfig) -> Manifest:
    """Make the token data folder `config.out`: `train/`, `heldout/`, `tokenizer/`, manifest.json.

    Work is done in `<out>.partial`, which appears as `<out>` when complete; run again after an
    interruption, the same request continues there. Progress and a summary go to stderr.

    Raises UserError for every mistake of the user's; `<out>.partial` is then removed. Raises
    `Pending` (exit code 75) while a Slurm job is at work, and `RunFault` (exit code 3) when the
    disk takes no more; the folder stays.
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
    try:
        manifest, tokens_per_s = make(config, plan, loaded, request_sha256, console)
    except OSError as error:  # what the input lacks was named before
        raise RunFault(f"{out} is not complete: {error}; run again to continue") from None
    rate = f"; {tokens_per_s:,.0f} tokens/s" if tokens_per_s else ""
    console.print(f"{out}: {summary(manifest)}{rate}", markup=False)
    return manifest


def make(
    config: PrepareConfig,
    plan: Plan,
    loaded: PreTrainedTokenizerFast | None,
    request_sha256: str,
    console: Console,
) -> tuple[Manifest, float]:
    """Do the work, or what is left of it; the manifest and the tokens per second of this run."""
    out = Path(config.out)
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
    return manifest, tokens_per_s


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
        executor=config.executor,
        executor_options=config.executor_options,
    )


def make_shards(tasks: list[InputTask], split: str | None, limit: int | None) -> list[Shard]:
    """Neighbouring tasks in at most MAX_SHARDS shards, or in one that can count to the limit."""
    count = min(len(tasks), MAX_SHARDS if limit is None else 1)
    bounds = [index * len(tasks) // count for index in range(count + 1)] if count else []
    return [Shard(tuple(tasks[start:end]), split, limit) for start, end in pairwise(bounds)]


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
