"""datatrove readers under one text policy.

Policy: invalid UTF-8 and lone surrogates become U+FFFD and a byte order mark at the start of a
file is removed; otherwise text is kept as it is (CRLF, NUL, U+200D included). Dropped and counted
by reason: `empty` (no text or only whitespace), `missing_text` (a record without the text field,
or null), `non_string_text`, `malformed_json`, `files_without_records`. Blank lines of a JSONL file
are no records.
"""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.pipeline.readers.huggingface import HuggingFaceDatasetReader

from groundlm.errors import UserError

UTF8_BOM = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
SURROGATES = re.compile("[\ud800-\udfff]")
READ_BYTES = 16 * 2**20
KEYS_REMEMBERED = 20


def clean(text: str | bytes) -> str:
    """Text that UTF-8 can hold: undecodable bytes and lone surrogates become U+FFFD."""
    if isinstance(text, bytes):
        return text.decode("utf-8", errors="replace")
    return text if text.isascii() else SURROGATES.sub("\ufffd", text)


class TextPolicy:
    """Mixin of every reader here: turns a record into a document or counts why it was dropped.

    `dropped` counts records by reason, `keys` remembers fields of records without the text field
    (for the error that names them); both grow while the reader is read.
    """

    text_key: str

    def start_counting(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.keys: set[str] = set()

    def get_document_from_dict(
        self, data: dict[str, Any], source_file: str, id_in_file: int | str
    ) -> Any:
        """The record's document, or None; takes the place of datatrove's adapter."""
        text = data.get(self.text_key)
        if text is None:
            self.dropped["missing_text"] += 1
            if len(self.keys) < KEYS_REMEMBERED:
                self.keys.update(map(str, data))
            return None
        if not isinstance(text, str):
            self.dropped["non_string_text"] += 1
            return None
        return self.get_document(text, f"{source_file}/{id_in_file}")

    def get_document(self, text: str | bytes, document_id: str) -> Any:
        """The document of a text, or None if it is blank."""
        text = clean(text)
        if not text or text.isspace():
            self.dropped["empty"] += 1
            return None
        return Document(text=text, id=document_id)


class FilesReader(TextPolicy, BaseDiskReader):
    """Reads the named files of a folder in order; subclasses read one open, decompressed file.

    Raises UserError naming the file when it cannot be read or is damaged.
    """

    def __init__(self, data_folder: str, names: list[str], text_key: str = "text") -> None:
        super().__init__(data_folder, text_key=text_key, add_file_path=False)
        self.names = names
        self.start_counting()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Documents of every `world_size`-th file, from the `rank`-th on."""
        yield from self.read_files_shard(self.names[rank::world_size])

    def read_file(self, filepath: str) -> Iterator[Any]:
        try:
            with self.data_folder.open(filepath, "rb") as raw:
                yield from self.read_open_file(decompressed(raw), filepath)
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            path = self.data_folder.resolve_paths(filepath)
            raise UserError(f"input file '{path}' cannot be read: {reason}") from error

    def read_open_file(self, file: IO[bytes], name: str) -> Iterator[Any]:
        raise NotImplementedError


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The file's content, gzip or Zstandard undone by magic bytes whatever the file's name."""
    head = raw.read(4)
    raw.seek(0)
    if head.startswith(GZIP_MAGIC):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    if head == ZSTD_MAGIC:
        # Arrow's stream, unlike zstandard's, reports a file that was cut off.
        return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))
    return raw


def skip_bom(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks without a byte order mark in front; the first must hold at least 3 bytes."""
    first = next(chunks, b"")
    yield first.removeprefix(UTF8_BOM)
    yield from chunks


class TextReader(FilesReader):
    """Plain text: each file one document, or several split at `separator` (not kept)."""

    name = "Text"

    def __init__(self, data_folder: str, names: list[str], separator: str | None = None) -> None:
        super().__init__(data_folder, names)
        self.separator = separator

    def read_open_file(self, file: IO[bytes], name: str) -> Iterator[Any]:
        chunks = skip_bom(iter(lambda: file.read(READ_BYTES), b""))
        parts = split_stream(chunks, self.separator.encode()) if self.separator else None
        for index, part in enumerate(parts or [b"".join(chunks)]):
            if document := self.get_document(part, f"{name}/{index}"):
                yield document


def split_stream(chunks: Iterator[bytes], separator: bytes) -> Iterator[bytes]:
    """The pieces between separators, holding one piece and one chunk in memory.

    Nothing follows a separator that ends the stream: it closes the last document.
    """
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    if rest:
        yield rest


class JsonLinesReader(FilesReader):
    """One JSON object a line, plain or compressed."""

    name = "JSON lines"

    def read_open_file(self, file: IO[bytes], name: str) -> Iterator[Any]:
        records = 0
        for index, line in enumerate(skip_bom(iter(file.readline, b""))):
            if not line.strip():
                continue
            records += 1
            record = parse_json(line)
            if not isinstance(record, dict):
                self.dropped["malformed_json"] += 1
            elif document := self.get_document_from_dict(record, name, index):
                yield document
        if not records:
            self.dropped["files_without_records"] += 1


def parse_json(line: bytes) -> Any:
    """The line's value, or None if it is not JSON; invalid UTF-8 and lone surrogates pass."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        # The standard parser is slower but takes what the policy repairs.
        try:
            return json.loads(clean(line))
        except (ValueError, RecursionError):
            return None


class ParquetTextReader(FilesReader):
    """The text column of Parquet files, one document a row."""

    name = "Parquet"

    def read_open_file(self, file: IO[bytes], name: str) -> Iterator[Any]:
        with pq.ParquetFile(file) as parquet:
            schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
            if not rows:
                self.dropped["files_without_records"] += 1
            elif self.text_key not in schema.names:
                self.dropped["missing_text"] += rows
                self.keys.update(schema.names[:KEYS_REMEMBERED])
            elif not is_text(schema.field(self.text_key).type):
                self.dropped["non_string_text"] += rows
            else:
                yield from self.read_column(parquet, name)

    def read_column(self, parquet: pq.ParquetFile, name: str) -> Iterator[Any]:
        row = 0
        for batch in parquet.iter_batches(batch_size=256, columns=[self.text_key]):
            # As bytes: a string column may hold invalid UTF-8, at which Arrow would give up.
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                if value is None:
                    self.dropped["missing_text"] += 1
                elif document := self.get_document(value, f"{name}/{row}"):
                    yield document
                row += 1


def is_text(kind: pa.DataType) -> bool:
    """Whether the column holds strings, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
    )
    return any(check(kind) for check in checks)


class HubReader(TextPolicy, HuggingFaceDatasetReader):
    """A data set of the Hugging Face hub, streamed; task `rank` reads its `rank`-th shard."""

    name = "Hub"

    def __init__(self, dataset: str, subset: str | None, split: str, text_key: str) -> None:
        options = {"name": subset, "split": split}
        super().__init__(dataset, options, streaming=True, text_key=text_key)
        self.start_counting()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        try:
            yield from super().run(data, rank, world_size)
        except (OSError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"data set '{self.dataset}' cannot be read: {reason}") from error
