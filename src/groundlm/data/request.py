"""What `groundlm prepare` is asked for: its settings, their checks, and a fingerprint."""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from groundlm.data.cluster import check_executor
from groundlm.data.pipeline import Plan
from groundlm.data.tokenizer import BYTE_ALPHABET_SIZE, tokenizer_sha256
from groundlm.errors import UserError

TRAIN_TOKENIZER = "train:"


@dataclass(frozen=True)
class PrepareConfig:
    """What to make token data from, and how. Neither `out` nor `workers` nor
    `executor` changes a byte of it."""

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

    executor: Literal["local", "slurm", "ray"] = "local"
    """What tokenises: processes of this machine (`workers`), a Slurm job array (submitted; the same
    command, run again when the job is done, finishes) or the Ray cluster that Ray finds."""

    executor_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of datatrove's SlurmPipelineExecutor or RayPipelineExecutor, such as partition,
    time or mem_per_cpu_gb. `workers` among them limits the tasks at one time, else unlimited."""


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
    if config.workers != 1 and config.executor != "local":
        raise UserError(
            f"--workers {config.workers} is for --executor local: name --executor-options.workers"
        )
    check_executor(config.executor, config.executor_options)
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


def source(config: PrepareConfig) -> dict[str, Any]:
    """What the user asked for, without what has a place of its own or changes nothing."""
    elsewhere = {
        *("out", "seed", "tokenizer", "eos_token"),
        *("workers", "executor", "executor_options"),
    }
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
