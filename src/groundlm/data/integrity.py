"""Whether token files still hold the bytes that were written."""

import hashlib
import json
import os
from pathlib import Path

from groundlm.data.manifest import FileInfo
from groundlm.errors import UserError

VERIFIED_NAME = ".verified.json"
SHA256_SHOWN = 12


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_files(folder: Path, files: list[FileInfo]) -> None:
    """Hold every byte of a split's files against the manifest; UserError names the first that
    differs.

    Files found sound are remembered by inode, size and times in `<folder>/.verified.json`, so that
    a corpus is read through once and not by every command and rank.
    """
    wanted = {file.name: file.sha256 for file in files}
    wanted |= {f"{file.name}.index": file.index_sha256 for file in files}
    known = _remembered(folder)
    found = {}
    for name, sha256 in wanted.items():
        stat = (folder / name).stat()
        # A copy has the size and may have the time of the original, but another inode.
        found[name] = [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, sha256]
        if known.get(name) == found[name]:
            continue
        have = file_sha256(folder / name)
        if have != sha256:
            raise UserError(
                f"token file '{folder / name}' has SHA-256 {have[:SHA256_SHOWN]}, not the "
                f"{sha256[:SHA256_SHOWN]} of the manifest: damaged, or not the file that was made"
            )
    if found != known:
        _remember(folder, found)


def _remembered(folder: Path) -> dict[str, list[object]]:
    try:
        known = json.loads((folder / VERIFIED_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(folder: Path, found: dict[str, list[object]]) -> None:
    partial = folder / f"{VERIFIED_NAME}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(found), "utf-8")
        partial.replace(folder / VERIFIED_NAME)
    except OSError:  # a read-only folder is read through each time
        partial.unlink(missing_ok=True)
