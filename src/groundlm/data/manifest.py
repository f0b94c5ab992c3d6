"""`manifest.json`: what a folder of token data holds, and what it was made from."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from groundlm.errors import UserError

FORMAT = "groundlm-token-data"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer as the user named it, its fingerprint, and its end-of-sequence token."""

    source: str
    sha256: str
    vocab_size: int
    eos_token: str
    eos_token_id: int


@dataclass(frozen=True)
class FileInfo:
    """One `.ds` file, name relative to its split's folder; its index is `<name>.index`."""

    name: str
    tokens: int
    documents: int
    size_bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """One split. `tokens` counts one EOS per document; `utf8_bytes` the text without it."""

    files: list[FileInfo]
    tokens: int
    documents: int
    utf8_bytes: int

    def content_sha256(self) -> str:
        """Fingerprint of the tokens and of where their documents end."""
        parts = [part for file in self.files for part in (file.sha256, file.index_sha256)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Everything about a folder of token data that its token files do not say themselves.

    `dtype` is `uint16` or `uint32` (little endian); `source` repeats the request as the user
    typed it; `dropped` counts records by reason (see `groundlm.data.readers`, and `eos_in_text`
    and `no_tokens` in `groundlm.data.steps`); `request_sha256` is equal for equal requests on
    equal input. There is no time and no machine in it: the same request gives the same bytes.
    """

    tokenizer: TokenizerInfo
    dtype: str
    vocab_size: int
    seed: int
    source: dict[str, Any]
    splits: dict[str, SplitInfo]
    dropped: dict[str, int]
    request_sha256: str
    versions: dict[str, str]

    def save(self, folder: Path) -> None:
        """Write `<folder>/manifest.json`, whole or not at all."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        partial = folder / f"{MANIFEST_NAME}.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        partial.replace(folder / MANIFEST_NAME)

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read `<folder>/manifest.json`; UserError if there is none or it is not one of ours."""
        path = Path(folder) / MANIFEST_NAME
        if not Path(folder).is_dir():
            raise UserError(f"token data '{folder}' does not exist (groundlm prepare makes it)")
        try:
            content = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise UserError(f"'{folder}' holds no {MANIFEST_NAME}: not token data") from error
        except (OSError, ValueError) as error:
            raise UserError(f"'{path}' cannot be read: {error}") from error
        keys = content if isinstance(content, dict) else {}
        found = f"{keys.get('format')} {keys.get('format_version')}"
        if found != f"{FORMAT} {FORMAT_VERSION}":
            raise UserError(f"'{path}' is of format '{found}', not '{FORMAT} {FORMAT_VERSION}'")
        try:
            return cls._from_content(content)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"'{path}' is damaged: {error}") from error

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> "Manifest":
        values = {field.name: content[field.name] for field in fields(cls)}
        values["tokenizer"] = TokenizerInfo(**values["tokenizer"])
        values["splits"] = {
            name: SplitInfo(**{**split, "files": [FileInfo(**file) for file in split["files"]]})
            for name, split in values["splits"].items()
        }
        kinds = {"dtype": str, "vocab_size": int, "seed": int, "source": dict, "dropped": dict}
        for name, kind in kinds.items():
            if not isinstance(values[name], kind):
                raise TypeError(f"{name} is {values[name]!r}, not of type {kind.__name__}")
        return cls(**values)
