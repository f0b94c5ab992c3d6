"""The pipeline step: read a shard, tokenise it once, write the token files of both splits."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from groundlm.data.corpora import InputTask

TRAIN, HELDOUT = "train", "heldout"
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 4 * 2**20
UINT16_IDS = 2**16
INDEX_BYTES = 8  # a document end in a `.ds.index`: little-endian uint64, in tokens


@dataclass(frozen=True)
class Shard:
    """What one task of the pipeline reads, in order, and where its documents go.

    `split` is `train` or `heldout`, or None to decide document by document (`is_heldout`).
    `limit` ends the shard after so many documents.
    """

    tasks: tuple[InputTask, ...]
    split: str | None
    limit: int | None = None

    def documents(self) -> Iterator[Any]:
        """The shard's datatrove documents."""
        every = (document for task in self.tasks for document in task.documents())
        return islice(every, self.limit)

    def dropped(self) -> Counter[str]:
        """Dropped records by reason, of what has been read."""
        # Tasks may share a reader (hub shards do), whose count must enter once.
        readers = {id(task.reader): task.reader for task in self.tasks}
        return sum((reader.dropped for reader in readers.values()), Counter())

    def keys(self) -> set[str]:
        """Fields seen in records that lacked the text field."""
        return set().union(*(task.reader.keys for task in self.tasks))


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The stored type of ids 0 to vocab_size - 1, little endian."""
    return np.dtype("<u2" if vocab_size <= UINT16_IDS else "<u4")


def is_heldout(text: str, seed: int, share: float) -> bool:
    """Whether a text belongs to the held-out split: SHA-256 of '<seed>:<text>' below the share.

    A function of the text alone, so equal documents are never on both sides, and neither order
    nor the number of tasks matters.
    """
    digest = hashlib.sha256(f"{seed}:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def batched(documents: Iterable[Any]) -> Iterator[list[Any]]:
    """Batches bounded by documents and by characters, as documents of any size may come."""
    batch: list[Any] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def prepared_backend(tokenizer_json: str, eos_token: str) -> Tokenizer:
    """The tokenizer as the pipeline uses it: text in, ids and one EOS out, nothing cut or padded.

    Text that spells a special token is encoded as ordinary text, and no BOS is put in front.
    """
    backend = Tokenizer.from_str(tokenizer_json)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    backend.post_processor = TemplateProcessing(
        single="$A <EOS>", special_tokens=[("<EOS>", backend.token_to_id(eos_token))]
    )
    return backend


class TokenizeShard(PipelineStep):
    """Tokenises shard `rank` and writes its documents, shuffled, to a token file per split.

    The tokenizer is `<scratch>/tokenizer.json`. Files made below `scratch`:
    `tokens/<split>/<rank>_00000_doc_shuffled.ds` with its `.index` (none for a split without
    documents) and `counts/<rank>.json`. Besides what the readers drop, a document is dropped when
    its text encodes to the EOS id all the same (`eos_in_text`, possible where the EOS token is an
    ordinary word of the vocabulary) or to nothing (`no_tokens`).
    """

    name = "Tokenize"
    type = "TOKENIZER"

    def __init__(
        self,
        shards: list[Shard],
        scratch: str,
        eos_token: str,
        vocab_size: int,
        seed: int,
        heldout_share: float,
    ) -> None:
        super().__init__()
        self.shards = shards
        self.scratch = scratch
        self.eos_token = eos_token
        self.vocab_size = vocab_size
        self.seed = seed
        self.heldout_share = heldout_share

    @cached_property
    def backend(self) -> Tokenizer:
        return prepared_backend(
            Path(self.scratch, "tokenizer.json").read_text("utf-8"), self.eos_token
        )

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Tokenise one shard; ends the pipeline."""
        shard = self.shards[rank]
        # Shuffling starts from a complete file elsewhere, so that a killed task leaves nothing
        # half-written where the merge looks.
        files = {split: self.token_file(rank, split) for split in (TRAIN, HELDOUT)}
        utf8_bytes, dropped = Counter[str](), Counter[str]()
        for batch in batched(shard.documents()):
            encodings = self.backend.encode_batch_fast([document.text for document in batch])
            for document, encoding in zip(batch, encodings, strict=True):
                ids = self.checked_ids(encoding.ids, dropped)
                if ids is not None:
                    split = shard.split or self.split_of(document.text)
                    files[split].write_bytes(ids.tobytes())
                    utf8_bytes[split] += len(document.text.encode())
        documents = {split: len(file.doc_ends) for split, file in files.items()}
        for index, (split, file) in enumerate(files.items()):
            file.close()
            if documents[split]:
                order = np.random.default_rng([self.seed, rank, index])
                file.copy(
                    "",
                    order.permutation(documents[split]),
                    rank=rank,
                    new_output_folder=f"{self.scratch}/tokens/{split}",
                    sub_filename="doc_shuffled",
                )
            file.cleanup()
        self.save_counts(rank, documents, utf8_bytes, dropped + shard.dropped(), shard.keys())

    def split_of(self, text: str) -> str:
        return HELDOUT if is_heldout(text, self.seed, self.heldout_share) else TRAIN

    def token_file(self, rank: int, split: str) -> TokenizedFile:
        return TokenizedFile(
            f"{self.scratch}/unshuffled/{split}",
            f"{rank:05d}.ds",
            # The label must not be a path: the merger splits it at '|'.
            tokenizer_name_or_path="groundlm",
            save_final_metadata=True,
            token_size=id_type(self.vocab_size).itemsize,
        )

    def checked_ids(self, encoded: list[int], dropped: Counter[str]) -> np.ndarray | None:
        """The ids in their stored type, or None if the document is to be dropped."""
        ids = np.array(encoded, dtype=np.int64)
        if len(ids) < 2:
            dropped["no_tokens"] += 1
            return None
        if (ids[:-1] == ids[-1]).any():
            dropped["eos_in_text"] += 1
            return None
        if ids.max() >= self.vocab_size:
            raise OverflowError(f"id {ids.max()} outside the vocabulary of {self.vocab_size}")
        return ids.astype(id_type(self.vocab_size))

    def save_counts(
        self,
        rank: int,
        documents: dict[str, int],
        utf8_bytes: Counter[str],
        dropped: Counter[str],
        keys: set[str],
    ) -> None:
        counts = {
            "documents": documents,
            "utf8_bytes": dict(utf8_bytes),
            "dropped": dict(dropped),
            "keys": sorted(keys),
        }
        folder = Path(self.scratch, "counts")
        folder.mkdir(exist_ok=True)
        (folder / f"{rank:05d}.json").write_text(json.dumps(counts), "utf-8")
