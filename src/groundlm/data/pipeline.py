"""The work of one preparation, step by step, in its work folder."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger
from datatrove.utils.logging import setup_default_logger
from rich.text import Text
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from groundlm.data.cluster import run_on_cluster
from groundlm.data.executor import LOG_NAME, TOKENISE, QuietExecutor, WorkInterrupted
from groundlm.data.integrity import file_sha256
from groundlm.data.manifest import FileInfo, SplitInfo
from groundlm.data.steps import (
    HELDOUT,
    INDEX_BYTES,
    Shard,
    TokenizeShard,
    id_type,
    is_heldout,
)
from groundlm.data.tokenizer import canonical_json, train_tokenizer, vocabulary_size
from groundlm.data.workfolder import SCRATCH_NAME
from groundlm.errors import UserError

# Text on which a tokenizer is trained, from the front of the train split: more changes little,
# and the trainer keeps a table of all distinct words in memory.
TOKENIZER_TEXT_BYTES = 10**9
MAX_TOKENS_PER_FILE = 2**30
STATUS_PERIOD_S = 0.5


@dataclass(frozen=True)
class Plan:
    """What is to be done: shards in order, splits to make, and the names for messages.

    `inputs` are the user's words for where each split's documents come from.
    """

    shards: list[Shard]
    splits: tuple[str, ...]
    inputs: dict[str, list[str]]
    text_key: str
    seed: int
    heldout_share: float
    workers: int
    executor: str
    executor_options: dict[str, Any]


@dataclass(frozen=True)
class Tally:
    """Sums over the shards: documents and bytes of text by split, dropped records by reason."""

    documents: Counter[str]
    utf8_bytes: Counter[str]
    dropped: Counter[str]


class Work:
    """The steps of one preparation; each continues what an interrupted run left in the folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        # Absolute, as tasks on other machines start elsewhere.
        self.scratch = (folder / SCRATCH_NAME).absolute()
        self.plan = plan
        self.token_bytes = 2
        self.doing = "reading"
        self.status_read_s = 0.0
        self.status = Text("")

    def __rich__(self) -> Text:
        """The status line: what is being done, and how far it is."""
        if time.monotonic() - self.status_read_s > STATUS_PERIOD_S:
            self.status_read_s = time.monotonic()
            done = len(list(self.scratch.glob("counts/*.json")))
            self.status = Text(
                f"{self.folder.name}: {self.doing}, {self.tokens_on_disk() / 1e6:,.1f} M tokens, "
                f"{done}/{len(self.plan.shards)} shards"
            )
        return self.status

    def tokens_on_disk(self) -> int:
        """Tokens in the files of the shards, finished or not."""
        size_bytes = 0
        for path in self.scratch.glob("*/*/*.ds"):
            try:
                size_bytes += path.stat().st_size
            except FileNotFoundError:  # a worker is moving on
                continue
        return size_bytes // self.token_bytes

    def train_tokenizer(self, vocab_size: int) -> PreTrainedTokenizerFast:
        """The tokenizer trained on the train split's first TOKENIZER_TEXT_BYTES of text."""
        trained = self.scratch / "trained"
        if not trained.is_dir():
            self.doing = "training the tokenizer"
            partial = self.scratch / "trained.partial"
            train_tokenizer(self.train_texts(), vocab_size).save_pretrained(str(partial))
            partial.rename(trained)
        # Always through the file, so that a continued run works with the very same object.
        return AutoTokenizer.from_pretrained(str(trained))

    def train_texts(self) -> Iterator[str]:
        """Texts of the train split in input order, up to TOKENIZER_TEXT_BYTES."""
        total_bytes = 0
        # A copy: reading counts what the readers drop, and that is for the tokenising to do.
        for shard in deepcopy(self.plan.shards):
            for document in shard.documents() if shard.split != HELDOUT else ():
                if shard.split is None and is_heldout(
                    document.text, self.plan.seed, self.plan.heldout_share
                ):
                    continue
                yield document.text
                total_bytes += len(document.text.encode())
                if total_bytes >= TOKENIZER_TEXT_BYTES:
                    return

    def tokenise(self, tokenizer: PreTrainedTokenizerFast) -> float:
        """Tokenise all shards that are not done yet; returns the tokens per second of this run, 0
        if there was nothing to do."""
        self.doing = "tokenising"
        backend_path = self.scratch / "tokenizer.json"
        backend_path.write_text(canonical_json(tokenizer), "utf-8")
        vocab_size = vocabulary_size(tokenizer)
        self.token_bytes = id_type(vocab_size).itemsize
        step = TokenizeShard(
            self.plan.shards,
            str(self.scratch),
            str(tokenizer.eos_token),
            vocab_size,
            self.plan.seed,
            self.plan.heldout_share,
        )
        start_s, start_tokens = time.monotonic(), self.tokens_on_disk()
        tasks = len(self.plan.shards)
        if self.plan.executor == "local":
            self.execute(step, TOKENISE, tasks)
        else:
            run_on_cluster(
                self.plan.executor, self.plan.executor_options, step, tasks, self.scratch
            )
        return (self.tokens_on_disk() - start_tokens) / (time.monotonic() - start_s)

    def execute(self, step: Any, name: str, tasks: int) -> None:
        """Run a step's tasks that no earlier run has completed."""
        try:
            QuietExecutor([step], tasks, self.plan.workers, self.scratch, name).run()
        except BrokenProcessPool as error:
            raise WorkInterrupted(
                "a worker process was killed (out of memory?): run again to continue, with fewer "
                "--workers perhaps"
            ) from error

    def tally(self) -> Tally:
        """Add up the shards' counts; UserError if a split that is to be made has no document."""
        tally = Tally(Counter(), Counter(), Counter())
        keys: set[str] = set()
        for path in sorted(self.scratch.glob("counts/*.json")):
            counts = json.loads(path.read_text("utf-8"))
            tally.documents.update(counts["documents"])
            tally.utf8_bytes.update(counts["utf8_bytes"])
            tally.dropped.update(counts["dropped"])
            keys.update(counts["keys"])
        for split in self.plan.splits:
            if not tally.documents[split]:
                raise UserError(self.nothing_in(split, tally, keys))
        return tally

    def nothing_in(self, split: str, tally: Tally, keys: set[str]) -> str:
        """Why a split has no documents, in one line."""
        total = tally.documents.total()
        by_document = any(shard.split is None for shard in self.plan.shards)
        if total and by_document:
            return (
                f"the {split} split is empty: --heldout-share {self.plan.heldout_share} put "
                f"{tally.documents[HELDOUT]:,} of {total:,} documents aside; change it (0 for no "
                "held-out split) or name --heldout-input"
            )
        names = ", ".join(f"'{name}'" for name in self.plan.inputs[split])
        if tally.dropped["missing_text"] and keys:
            return (
                f"no record of {names} has the field '{self.plan.text_key}' "
                f"({tally.dropped['missing_text']:,} lack it): name one of "
                f"{', '.join(sorted(keys))} with --text-key"
            )
        reasons = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.dropped.items()))
        return f"input {names} holds no documents (dropped: {reasons or 'none'})"

    def merge(self, split: str, tally: Tally) -> SplitInfo:
        """Shuffle the shards' documents of a split together into `<split>/`."""
        self.doing = f"shuffling {split}"
        folder = self.folder / split
        step = DocumentTokenizerMerger(
            str(self.scratch / "tokens" / split),
            str(folder),
            split,
            max_tokens_per_file=MAX_TOKENS_PER_FILE,
            seed=self.plan.seed,
            progress=False,
        )
        self.execute(step, f"merge_{split}", 1)
        for path in folder.glob("*.metadata"):
            path.unlink()
        files = [self.file_info(path) for path in sorted(folder.glob("*.ds"))]
        info = SplitInfo(
            files=files,
            tokens=sum(file.tokens for file in files),
            documents=sum(file.documents for file in files),
            utf8_bytes=tally.utf8_bytes[split],
        )
        if info.documents != tally.documents[split]:
            raise RuntimeError(
                f"{split}: {info.documents} merged of {tally.documents[split]} documents"
            )
        return info

    def file_info(self, path: Path) -> FileInfo:
        size_bytes = path.stat().st_size
        index = path.with_name(f"{path.name}.index")
        return FileInfo(
            name=path.name,
            tokens=size_bytes // self.token_bytes,
            documents=index.stat().st_size // INDEX_BYTES,
            size_bytes=size_bytes,
            sha256=file_sha256(path),
            index_sha256=file_sha256(index),
        )


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Send what datatrove and its logger say to the log in the scratch folder."""
    with open(folder / SCRATCH_NAME / LOG_NAME, "a", encoding="utf-8") as log:
        try:
            with redirect_stderr(log):
                setup_default_logger()
                yield
        finally:
            setup_default_logger()
