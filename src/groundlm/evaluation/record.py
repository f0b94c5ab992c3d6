"""What a result says about where it comes from, and how it is written."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from groundlm.errors import UserError
from groundlm.model.loading import one_line

T = TypeVar("T")


@functools.cache
def git_commit() -> str | None:
    """The commit of the checkout that this package is in, with `-dirty` if its files differ.

    Looked up once: what runs is what was there when it was started.

    None where the package was installed, even into an environment inside some other checkout.
    """
    package = Path(__file__).resolve().parents[1]
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    return done.stdout.strip()


def trained_with(model_dir: str | Path, setting: str, kind: type[T]) -> T | None:
    """What a checkpoint was trained with, by its `section.field`.

    Averaged weights (`<checkpoint>/ema`) are of their checkpoint. None if nothing that we wrote
    says so, or what is said is of another kind.
    """
    folder = Path(model_dir).resolve()
    folder = folder.parent if folder.name == "ema" else folder
    try:
        progress = json.loads((folder / "training" / "progress.json").read_text("utf-8"))
        value = progress["settings"][setting]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if type(value) is kind else None


def run_folder(model_dir: str | Path) -> Path | None:
    """The run that a model is a checkpoint of (`<run>/checkpoints/<model>`), or None."""
    model = Path(model_dir).resolve()
    return model.parents[1] if model.parent.name == "checkpoints" else None


def make_folder_of(path: Path) -> None:
    """Make sure, before the work, that a result can be written; raises `UserError` if not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        partial = Path(f"{path}.partial")
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as indented JSON, whole or not at all."""
    _write(path, json.dumps(value, indent=2) + "\n")


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write objects one a line, whole or not at all."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    partial = Path(f"{path}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None
