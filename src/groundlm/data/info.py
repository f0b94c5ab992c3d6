"""`groundlm data-info`: what a folder of token data holds, checked to the last id."""

import json
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from groundlm.data.manifest import Manifest, SplitInfo
from groundlm.data.tokenizer import load_tokenizer, tokenizer_sha256
from groundlm.data.windows import SEEDS, TokenSplit
from groundlm.errors import UserError

SHA256_SHOWN = 12
EOS_STYLE = "bold cyan"
# Shown as escapes: control and format characters (NUL, newline, U+200D, a change of the writing
# direction), lone surrogates, private and unassigned ones, line and paragraph separators.
ESCAPED_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@dataclass(frozen=True)
class DataInfoConfig:
    """What to show of a folder of token data."""

    data: str
    """Folder that `groundlm prepare` made."""

    windows: int = 3
    """Stretches of text to decode and show, per split (0: none)."""

    window_tokens: int = 64
    """Tokens of each."""

    seed: int = 1
    """Seed of the choice of stretches."""


def data_info(config: DataInfoConfig) -> None:
    """Print counts, tokenizer, files and some decoded text; the last line is a JSON document.

    Reads every id of every file first, so that nothing is shown of data that is not sound.

    Raises UserError naming the file that is missing, of another size or content than the manifest
    says, or a tokenizer that is not the one of the manifest.
    """
    if config.windows < 0 or config.window_tokens < 1 or not 0 <= config.seed < SEEDS:
        raise UserError(
            f"--windows {config.windows} must be at least 0, --window-tokens "
            f"{config.window_tokens} at least 1, --seed {config.seed} in [0, {SEEDS})"
        )
    manifest = Manifest.load(config.data)
    tokenizer = matching_tokenizer(config.data, manifest)
    splits = {name: TokenSplit.open(config.data, name) for name in manifest.splits}
    with Console(file=sys.stderr).status("reading every id"):
        ids_used = {name: ids_in_use(split) for name, split in splits.items()}
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(settings_table(config.data, manifest))
        console.print(splits_table(manifest, ids_used))
        console.print(files_table(manifest))
        for name, split in splits.items():
            for start, ids in windows(split, config):
                title = f"{name}, tokens {start:,} to {start + len(ids) - 1:,}"
                console.print(Text(title, style="bold"))
                console.print(decoded(ids, tokenizer))
                console.print()
    # What the terminal or pipe cannot write must not end the command.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(capture.get().encode(encoding, "replace").decode(encoding))
    print(json.dumps(document(config.data, manifest, ids_used)))


def matching_tokenizer(data: str, manifest: Manifest) -> PreTrainedTokenizerFast:
    """The folder's tokenizer; UserError if it is not the one of the manifest."""
    folder = str(Path(data) / "tokenizer")
    tokenizer = load_tokenizer(folder, manifest.tokenizer.eos_token)
    found = tokenizer_sha256(tokenizer)
    if found != manifest.tokenizer.sha256:
        raise UserError(
            f"tokenizer '{folder}' has SHA-256 {found[:SHA256_SHOWN]}, not the "
            f"{manifest.tokenizer.sha256[:SHA256_SHOWN]} of the manifest"
        )
    return tokenizer


def ids_in_use(split: TokenSplit) -> int:
    """How many of the vocabulary's ids occur."""
    return int(np.count_nonzero(split.unigram_counts()))


def settings_table(data: str, manifest: Manifest) -> Table:
    """Source, tokenizer and the rest that is the same for all splits."""
    table = Table(title=escaped(data), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    tokenizer = manifest.tokenizer
    rows = {key: value for key, value in manifest.source.items() if value not in (None, [])}
    rows |= {
        "tokenizer": f"{tokenizer.source} (SHA-256 {tokenizer.sha256[:SHA256_SHOWN]})",
        "vocabulary": f"{manifest.vocab_size:,} ids, stored as {manifest.dtype}",
        "end of sequence": f"{tokenizer.eos_token} (id {tokenizer.eos_token_id})",
        "seed": manifest.seed,
        "dropped": ", ".join(f"{n:,} {why}" for why, n in manifest.dropped.items()) or "nothing",
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
    }
    for key, value in rows.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(key.replace("_", " "), escaped(shown))
    return table


def counts_table(name: str, *counts: str) -> Table:
    """An empty table of names and numbers; in a narrow terminal it breaks lines, cuts nothing."""
    table = Table()
    table.add_column(name, overflow="fold")
    for heading in counts:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def splits_table(manifest: Manifest, ids_used: dict[str, int]) -> Table:
    table = counts_table(
        "split", "tokens", "documents", "UTF-8 bytes", "bytes per token", "ids used"
    )
    for name, split in manifest.splits.items():
        counts = (split.tokens, split.documents, split.utf8_bytes)
        table.add_row(
            name,
            *(f"{count:,}" for count in counts),
            f"{bytes_per_token(split):.3f}",
            f"{ids_used[name]:,}",
        )
    return table


def files_table(manifest: Manifest) -> Table:
    """Files by size; where a split has several, why its last is shorter than the rest."""
    table = counts_table("file", "tokens", "documents", "bytes")
    if any(len(split.files) > 1 for split in manifest.splits.values()):
        table.caption = "the last file of a split is short on purpose: it holds the rest"
    for name, split in manifest.splits.items():
        for file in split.files:
            counts = (file.tokens, file.documents, file.size_bytes)
            table.add_row(escaped(f"{name}/{file.name}"), *(f"{count:,}" for count in counts))
    return table


def bytes_per_token(split: SplitInfo) -> float:
    """Bytes of text per token, the EOS of each document counted as a token."""
    return split.utf8_bytes / split.tokens


def windows(split: TokenSplit, config: DataInfoConfig) -> Iterator[tuple[int, np.ndarray]]:
    """(position, ids) of stretches chosen by the seed, in the order of the split."""
    length = min(config.window_tokens, split.tokens)
    random = np.random.RandomState(config.seed)
    starts = random.randint(0, split.tokens - length + 1, config.windows)
    for start in np.unique(starts).tolist():
        yield start, split.read(start, length)


def decoded(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The text of the ids, escaped, with every EOS token shown and a line ended after it.

    Text that spells the EOS token has neither its style nor a line's end. A character cut by the
    window's edge is U+FFFD, as the tokenizer decodes it.
    """
    shown = Text()
    ends = np.flatnonzero(ids == tokenizer.eos_token_id).tolist()
    start = 0
    for end in [*ends, len(ids)]:
        shown.append(escaped(tokenizer.decode(ids[start:end].tolist())).plain)
        if end < len(ids):
            shown.append(f"{tokenizer.eos_token}\n", style=EOS_STYLE)
        start = end + 1
    return shown


def escaped(text: str) -> Text:
    """The text with invisible characters (ESCAPED_CATEGORIES) and backslashes as escapes."""
    return Text(
        "".join(
            character.encode("unicode_escape").decode("ascii")
            if character == "\\" or unicodedata.category(character) in ESCAPED_CATEGORIES
            else character
            for character in text
        )
    )


def document(data: str, manifest: Manifest, ids_used: dict[str, int]) -> dict[str, Any]:
    """The counts as plain values."""
    splits = {
        name: asdict(split)
        | {"bytes_per_token": bytes_per_token(split), "ids_used": ids_used[name]}
        for name, split in manifest.splits.items()
    }
    return {"data": data, **asdict(manifest), "splits": splits}
