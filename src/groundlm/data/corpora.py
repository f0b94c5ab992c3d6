"""From what a user names as input to readers, one per task."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundlm.data import pydocs
from groundlm.data.readers import HubReader, JsonLinesReader, ParquetTextReader, TextReader
from groundlm.errors import UserError

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json.gz": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
# Found beside data in every downloaded data set, and no part of it.
NOT_DATA = ("readme", "license", "changelog")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class InputTask:
    """What one task reads: shard `rank` of `world_size` of a reader's data.

    `content` says what is read (a file's name and SHA-256, a hub data set's name, subset and
    split), so that equal contents give equal documents.
    """

    reader: Any
    content: str
    rank: int = 0
    world_size: int = 1

    def documents(self) -> Iterator[Any]:
        """datatrove documents in the order of the input; the reader counts what it drops."""
        yield from self.reader.run(None, self.rank, self.world_size)


@dataclass(frozen=True)
class InputOptions:
    """How inputs are read; the fields are those of `PrepareConfig`."""

    text_key: str
    subset: str | None
    split: str
    document_separator: str | None


def resolve_inputs(inputs: list[str], options: InputOptions) -> list[InputTask]:
    """Tasks that read the inputs in order; their number depends on the inputs alone.

    An input is the word `pydocs`; a Parquet, JSONL or plain text file; a folder, searched
    recursively in sorted order for such files (names that start with a dot or underscore and
    README, LICENSE and CHANGELOG files are left out); or `owner/name` on the Hugging Face hub.

    Raises UserError naming the input that is missing, of unknown kind, or a folder of no data.
    """
    tasks: list[InputTask] = []
    for name in inputs:
        path = Path(name)
        if name == "pydocs":
            tasks.append(InputTask(pydocs.PydocsReader(), f"pydocs of {pydocs.version()}"))
        elif path.is_dir():
            tasks += file_tasks(path, files_of(path), options)
        elif path.is_file():
            if kind_of(path) is None:
                raise UserError(f"input '{name}' is none of {', '.join(KINDS)}")
            tasks += file_tasks(path.parent, [path], options)
        elif HUB_NAME.fullmatch(name) and kind_of(path) is None:
            tasks += hub_tasks(name, options)
        else:
            raise UserError(f"input '{name}' does not exist")
    return tasks


def kind_of(path: Path) -> str | None:
    """The kind of file by its name, or None if it is none we read."""
    name = path.name.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def files_of(folder: Path) -> list[Path]:
    """The data files below a folder, sorted by path."""
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and kind_of(path) is not None
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
        and not path.name.lower().startswith(NOT_DATA)
    ]
    if not found:
        raise UserError(f"input folder '{folder}' holds no {', '.join(KINDS)} file")
    return sorted(found)


def file_tasks(folder: Path, files: list[Path], options: InputOptions) -> list[InputTask]:
    """A task per file of a folder."""
    root = str(folder.absolute())  # a task may run on another machine, in another folder
    tasks = []
    for path in files:
        name = str(path.relative_to(folder))
        kind = kind_of(path)
        reader: Any
        if kind == "parquet":
            reader = ParquetTextReader(root, [name], options.text_key)
        elif kind == "jsonl":
            reader = JsonLinesReader(root, [name], options.text_key)
        else:
            reader = TextReader(root, [name], unescape(options.document_separator))
        tasks.append(InputTask(reader, file_fingerprint(folder, name)))
    return tasks


def unescape(separator: str | None) -> str | None:
    r"""The separator with `\n`, `\r` and `\t`, as typed in a shell, made the characters."""
    if separator is None:
        return None
    for typed, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
        separator = separator.replace(typed, character)
    return separator


def file_fingerprint(folder: Path, name: str) -> str:
    """Name and hex SHA-256 of the content of a file; far cheaper than tokenising it.

    The content and not the time of change: a copied corpus is the same corpus, and the token data
    made from it is the same to the byte.
    """
    try:
        with open(folder / name, "rb") as file:
            return f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise UserError(f"input '{folder / name}' cannot be read: {error.strerror}") from error


def hub_tasks(name: str, options: InputOptions) -> list[InputTask]:
    """A task per shard of a streamed hub data set."""
    import datasets

    try:
        dataset = datasets.load_dataset(
            name, name=options.subset, split=options.split, streaming=True
        )
        shards = dataset.num_shards
    # Network, hub and builder errors share no base class.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"input '{name}' is no file or folder here, nor a data set that can be read from the "
            f"hub: {reason}"
        ) from error
    reader = HubReader(name, options.subset, options.split, options.text_key)
    content = f"hub {name} {options.subset} {options.split} {shards}"
    return [InputTask(reader, content, rank, shards) for rank in range(shards)]
