"""datatrove's local executor made quiet, and safe to kill and to run again."""

import fcntl
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

from datatrove.executor.local import LocalPipelineExecutor

from groundlm.errors import UserError

WORKERS_LOCK_NAME = "workers.lock"
LOG_NAME = "log.txt"
# The folder of logs and completion markers of the tokenising: any executor goes on where another
# left off.
TOKENISE = "tokenise"


class WorkInterrupted(UserError):
    """Work stopped for no fault of the request; running again continues it."""


class QuietExecutor(LocalPipelineExecutor):
    """datatrove's local executor with its chatter in a log file, and workers that end with us.

    The pool is `concurrent.futures`' own: it notices a worker that was killed (datatrove's waits
    for it for ever) and needs no manager process, which a `kill -9` would leave behind.
    """

    def __init__(self, pipeline: list[Any], tasks: int, workers: int, scratch: Path, name: str):
        super().__init__(
            pipeline, tasks=tasks, workers=workers, logging_dir=str(scratch / "logs" / name)
        )
        self.pipeline = pipeline
        self.log_file = str(scratch / LOG_NAME)
        self.lock_file = str(scratch / WORKERS_LOCK_NAME)

    def run(self) -> None:
        """Run the tasks that have not been completed, in this process if there is one worker."""
        ranks = self.get_incomplete_ranks()
        workers = min(self.workers, len(ranks))
        if workers <= 1:
            pipeline = self.pipeline
            for rank in ranks:
                self.pipeline = deepcopy(pipeline)
                self._run_for_rank(rank)
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["groundlm.data.steps"])
        started = (self.log_file, self.lock_file)
        with ProcessPoolExecutor(workers, context, start_worker, started) as pool:
            futures = [pool.submit(self._run_for_rank, rank) for rank in ranks]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                # Whoever handles the error may remove the files the others still write.
                for process in list(pool._processes.values()):
                    process.kill()
                pool.shutdown(cancel_futures=True)
                raise


def start_worker(log_file: str, lock_file: str) -> None:
    """Send a worker's messages to the log, and let it live no longer than the process it serves.

    After a `kill -9` of that process its workers would go on writing, and wait for work for ever.
    They hold a shared lock all their life, so that a rerun can wait until the files are its own.
    """
    sys.stderr = open(log_file, "a", buffering=1)  # noqa: SIM115
    lock = open(lock_file, "ab")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_SH)
    threading.Thread(target=end_with_parent, args=(lock,), daemon=True).start()


def end_with_parent(lock: IO[bytes]) -> None:
    """Wait for the end of the process that started the pool; the lock goes with this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def locked(path: str | Path, operation: int) -> Iterator[IO[bytes]]:
    """Hold an advisory lock (`fcntl.LOCK_*`) on a file; BlockingIOError as `fcntl.flock` does."""
    with open(path, "ab") as file:
        fcntl.flock(file, operation)
        yield file
