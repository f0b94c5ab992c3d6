"""The folder `<out>.partial` in which token data is made: lock, resume, clean up, finish."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from groundlm.data.cluster import check_job
from groundlm.data.executor import WORKERS_LOCK_NAME, WorkInterrupted, locked
from groundlm.data.manifest import MANIFEST_NAME, Manifest
from groundlm.errors import UserError

LOCK_NAME = "prepare.lock"
SCRATCH_NAME = "scratch"
REQUEST_NAME = "request.json"


@contextmanager
def work_folder(out: Path, request: dict[str, str]) -> Iterator[Path]:
    """`<out>.partial` for this request, locked: continued if it was started by an equal request,
    emptied if not.

    On success the caller renames it with `finish`. A UserError removes it; any other end leaves
    it for the next run to continue.

    Raises UserError if another process is at work in it or if it holds what is not ours.
    """
    work = out.with_name(f"{out.name}.partial")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out '{out}' cannot be written: {error.strerror}") from error
    foreign = {path.name for path in work.iterdir()} - {
        LOCK_NAME,
        SCRATCH_NAME,
        "train",
        "heldout",
        "tokenizer",
        MANIFEST_NAME,
        f"{MANIFEST_NAME}.partial",
    }
    if foreign:
        raise UserError(f"'{work}' holds '{min(foreign)}', which is not ours: move it away")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(work / LOCK_NAME, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"another groundlm prepare is writing '{work}'") from error
        try:
            start_or_continue(work, request)
            yield work
        except WorkInterrupted:
            raise
        except UserError:
            shutil.rmtree(work)
            raise


def start_or_continue(work: Path, request: dict[str, str]) -> None:
    """Keep the scratch files of an equal request; else remove all that an unequal one left.

    Raises `Pending` or WorkInterrupted if a Slurm job is still writing there.
    """
    scratch = work / SCRATCH_NAME
    wanted = json.dumps(request, sort_keys=True)
    if scratch.is_dir():
        # A killed run's workers get their signal after its own end: wait until they are gone.
        with locked(scratch / WORKERS_LOCK_NAME, fcntl.LOCK_EX):
            pass
    try:
        found = (scratch / REQUEST_NAME).read_text("utf-8")
    except OSError:
        found = None
    check_job(scratch, found == wanted)
    if found == wanted:
        return
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_NAME:
            path.unlink()
    scratch.mkdir()
    partial = scratch / f"{REQUEST_NAME}.partial"
    partial.write_text(wanted, "utf-8")
    partial.replace(scratch / REQUEST_NAME)


def finish(work: Path, out: Path, manifest: Manifest) -> None:
    """Write the manifest, remove the scratch files and give the folder its name.

    Killed half-way, the folder has no request any more and the next run makes it anew.
    """
    manifest.save(work)
    shutil.rmtree(work / SCRATCH_NAME)
    (work / LOCK_NAME).unlink()
    work.rename(out)


def reusable(out: Path, request_sha256: str) -> Manifest | None:
    """The manifest of finished token data if an equal request made it; None if `out` is free.

    Raises UserError if `out` holds anything else: nothing is ever overwritten.
    """
    if not out.exists() and not out.is_symlink():
        return None
    if not out.is_dir():
        raise UserError(f"--out '{out}' exists and is no folder")
    if not any(out.iterdir()):
        return None
    try:
        manifest = Manifest.load(out)
    except UserError as error:
        raise UserError(f"--out '{out}' exists and is not token data: {error}") from error
    if manifest.request_sha256 != request_sha256:
        raise UserError(
            f"--out '{out}' holds token data of another request (input, tokenizer, seed or split "
            "differ): choose another --out or remove it"
        )
    return manifest
