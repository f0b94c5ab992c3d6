"""Tokenising on a cluster: datatrove's Slurm and Ray executors, safe to stop and to run again.

The work folder, on a file system that all machines share, is the only link: each task leaves its
files there and then its completion marker, as it does on one machine.
"""

import getpass
import hashlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor

from groundlm.data.executor import TOKENISE, WorkInterrupted
from groundlm.errors import UserError, nearest

EXECUTORS = {"slurm": SlurmPipelineExecutor, "ray": RayPipelineExecutor}
# Arguments of the executors that are ours to give.
OWN_OPTIONS = {
    *("self", "pipeline", "tasks", "logging_dir", "skip_completed"),
    *("job_name", "job_id_position", "job_id_retriever", "depends"),
}
SLURM_RECORD_NAME = "slurm.json"
ERROR_LINE = re.compile(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


class Pending(WorkInterrupted):
    """A Slurm job is at work; the same command, run again when it is done, goes on."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's Slurm executor under a job name by which its jobs are found in the queue.

    Its extra job that adds up statistics is left out: after a failed task it would wait for ever.
    """

    def launch_merge_stats(self) -> None:
        """Submit nothing."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        return {**super().get_sbatch_args(max_array), "job-name": self.job_name}


def check_executor(executor: str, options: dict[str, Any]) -> None:
    """Raise UserError for an executor that cannot be had here, or options that are not its own."""
    if executor == "local":
        if options:
            raise UserError(f"--executor-options.{min(options)} is for --executor slurm or ray")
        return
    if executor not in EXECUTORS:
        raise UserError(f"--executor '{executor}' is none of local, {', '.join(EXECUTORS)}")
    parameters = inspect.signature(EXECUTORS[executor].__init__).parameters
    known = [name for name in parameters if name not in OWN_OPTIONS]
    for name in options:
        if name in OWN_OPTIONS:
            raise UserError(f"--executor-options.{name} is set by prepare itself")
        if name not in known:
            raise UserError(
                f"--executor {executor} has no option '{name}'{nearest(str(name), known)}"
            )
    required = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in options]
    if missing:
        named = " and ".join(f"--executor-options.{name}" for name in missing)
        raise UserError(f"--executor {executor} needs {named}")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError("--executor ray needs the package ray (pip install ray)")
    for program in ("sbatch", "squeue") if executor == "slurm" else ():
        if shutil.which(program) is None:
            raise UserError(f"--executor slurm needs Slurm: there is no {program} on this machine")


def run_on_cluster(
    executor: str, options: dict[str, Any], step: Any, tasks: int, scratch: Path
) -> None:
    """Run a step's tasks that have not been completed yet.

    Raises `Pending` once they are submitted to Slurm, WorkInterrupted if they cannot be or if
    tasks fail on Ray; returns when all are complete.
    """
    settings = {"tasks": tasks, "logging_dir": str(scratch / "logs" / TOKENISE), **options}
    if executor == "ray":
        run_on_ray(RayPipelineExecutor([step], **settings))
    else:
        if not {"env_command", "condaenv", "venv_path"} & set(options):
            # The job's shell finds the very programs of this Python, activated or not.
            settings["env_command"] = f'export PATH="{sysconfig.get_path("scripts")}:$PATH"'
        name = f"groundlm-{hashlib.sha256(str(scratch).encode()).hexdigest()[:16]}"
        submit(SlurmExecutor([step], job_name=name, **settings), scratch / SLURM_RECORD_NAME)


def run_on_ray(executor: RayPipelineExecutor) -> None:
    """Wait for the tasks; datatrove itself only logs those that fail."""
    executor.run()
    missing = executor.get_incomplete_ranks()
    if missing:
        raise WorkInterrupted(
            f"{progress(executor.logging_dir, executor.tasks)} on Ray"
            f"{failure(executor, missing)}: run again to continue"
        )


def submit(executor: SlurmExecutor, record: Path) -> None:
    """Submit what is not complete, if anything is not, and raise `Pending`."""
    missing = executor.get_incomplete_ranks()
    if not missing:
        return
    before = ""
    if record.is_file():
        done = progress(executor.logging_dir, executor.tasks)
        before = f"the last Slurm job ended with {done}{failure(executor, missing)}; "
    # Before the job exists: killed in between, the next run looks for it all the same.
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps({"job_name": executor.job_name, "tasks": executor.tasks}))
    partial.replace(record)
    try:
        executor.launch_job()
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorkInterrupted(f"sbatch has not taken the job: {error}") from error
    raise Pending(
        f"{before}{len(missing):,} of {executor.tasks:,} tasks submitted as Slurm job "
        f"{executor.job_id}: run the same command again when it is done, to merge"
    )


def check_job(scratch: Path, same_request: bool) -> None:
    """Raise if a Slurm job submitted from this scratch folder is still pending or running."""
    try:
        record = json.loads((scratch / SLURM_RECORD_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return
    jobs = ", ".join(queued_jobs(record["job_name"]))
    if jobs and not same_request:
        raise WorkInterrupted(
            f"Slurm job {jobs} is at work in '{scratch.parent}' for another request: end it "
            f"(scancel {jobs}) or choose another --out"
        )
    if jobs:
        done = progress(scratch / "logs" / TOKENISE, record["tasks"])
        raise Pending(
            f"Slurm job {jobs} is at work, {done}: run the same command again when it is done, "
            "to merge"
        )


def queued_jobs(name: str) -> list[str]:
    """Ids of this user's jobs of that name that Slurm has not ended."""
    command = [
        "squeue",
        "--noheader",
        "--user",
        getpass.getuser(),
        "--name",
        name,
        "--format",
        "%F",
    ]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        raise WorkInterrupted(
            f"squeue cannot say whether the Slurm job is still at work: {said}"
        ) from error
    return sorted(set(found.stdout.split()))


def progress(logs: Any, tasks: int) -> str:
    """How many of the tasks have their completion marker."""
    folder = Path(getattr(logs, "path", logs), "completions")
    return f"{len(list(folder.glob('*'))):,} of {tasks:,} tasks done"


def failure(executor: PipelineExecutor, missing: list[int]) -> str:
    """` (task N: the error)` of the first task whose log tells of one, or ''."""
    for rank in missing:
        log = Path(executor.logging_dir.path, "logs", f"task_{rank:05d}.log")
        if log.is_file() and (errors := ERROR_LINE.findall(log.read_text("utf-8", "replace"))):
            return f" (task {rank}: {errors[-1]})"
    return ""
