"""The folder of a run: told from other folders, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from groundlm.errors import RunFault, UserError
from groundlm.training.metrics import replace_text

CONFIG_NAME = "config.yaml"
MARK = "# groundlm train: the configuration of this run, all fields filled in\n"


@contextmanager
def held(
    folder: Path, option: str = "--training.out", mark: str = MARK, kind: str = "run"
) -> Iterator[None]:
    """Make the folder if need be and keep every other process from working in it.

    `option` and `kind` name folder and content in messages; a config.yaml that begins with `mark`
    tells our folders from others. What is still empty at the end is removed again.

    Raises UserError if it cannot be made, another process holds it, or it holds something else.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be written: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work in {folder}") from None
        check_is_ours(folder, mark, kind)
        yield
    finally:
        os.close(handle)
        with suppress(OSError):
            for path in made:
                path.rmdir()


def check_is_ours(folder: Path, mark: str, kind: str) -> None:
    """Refuse a folder that has files and no configuration that we wrote."""
    try:
        marked = (folder / CONFIG_NAME).read_text("utf-8", "replace").startswith(mark)
    except OSError:
        marked = False
    others = {path.name for path in folder.iterdir()} - {f"{CONFIG_NAME}.partial"}
    if others and not marked:
        raise UserError(f"{folder} is not empty and holds no {kind}")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.yaml, which also marks the folder as a run's.

    Raises RunFault if the disk does not take it.
    """
    try:
        replace_text(folder / CONFIG_NAME, MARK + yaml.safe_dump(config, sort_keys=False))
    except OSError as error:
        raise RunFault(f"{folder / CONFIG_NAME} cannot be written: {error}") from None
