"""Slurm and Ray without either: stand-ins that run the tasks here, one by one."""

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datatrove.executor import ray as datatrove_ray
from datatrove.tools import launch_pickled_pipeline

from groundlm.data import cluster
from groundlm.data.cluster import Pending
from groundlm.data.executor import WorkInterrupted
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.errors import UserError

PROGRAMS = {
    # Keeps the script as $SLURM_FAKE/<job>.sh and queues the job as a file <job>.queued.
    "sbatch": """
        if [ -e "$SLURM_FAKE/refuse" ]; then exit 3; fi
        job=$((101 + $(ls "$SLURM_FAKE" | grep -c '\\.sh$')))
        cp "${@: -1}" "$SLURM_FAKE/$job.sh"
        sed -n 's/^#SBATCH --job-name=//p' "$SLURM_FAKE/$job.sh" > "$SLURM_FAKE/$job.queued"
        echo "Submitted batch job $job" """,
    "squeue": """
        if [ -e "$SLURM_FAKE/silent" ]; then echo "slurm_load_jobs: no contact" >&2; exit 1; fi
        while [ "$1" != --name ]; do shift; done
        cd "$SLURM_FAKE"
        grep -lx -- "$2" *.queued | sed 's/\\.queued$//'
        true""",
    "scontrol": """echo node1""",
    "srun": """
        while [ "$1" != launch_pickled_pipeline ]; do shift; done
        exec "$@" """,
}
SLURM_OPTIONS = {"partition": "cpu", "time": "00:10:00", "tasks_per_job": 2}


def task_environment(index: int) -> dict[str, str]:
    return {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_NODELIST": "node1", "RUN_OFFSET": "0"}


class Slurm:
    """The state of the stand-in programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("*.sh"))]

    def run_script(self, job: int, index: int) -> None:
        """An array task as Slurm runs it, from another folder."""
        subprocess.run(
            ["bash", self.folder / f"{job}.sh"],
            env=os.environ | task_environment(index),
            cwd="/",
            check=True,
            capture_output=True,
        )

    def run_here(self, job: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the script calls, without the seconds that a new process takes to import."""
        (script,) = re.findall(r"launch_pickled_pipeline (\S+)", self.scripts()[job - 101])
        handler = signal.getsignal(signal.SIGUSR1)
        with monkeypatch.context() as patched:
            for name, value in task_environment(index).items():
                patched.setenv(name, value)
            patched.setattr(sys, "argv", ["launch_pickled_pipeline", script])
            launch_pickled_pipeline.main()
        signal.signal(signal.SIGUSR1, handler)

    def end(self, job: int) -> None:
        (self.folder / f"{job}.queued").unlink()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    programs, state = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    state.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    # Without the environment's own programs: the job must find them by itself.
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_FAKE", str(state))
    return Slurm(state)


@pytest.fixture
def on_slurm(config: PrepareConfig) -> PrepareConfig:
    return replace(config, executor="slurm", executor_options=SLURM_OPTIONS)


def pending(config: PrepareConfig) -> str:
    """The line of a `prepare` that has to be run again."""
    with pytest.raises(Pending) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 75
    return str(caught.value)


def test_slurm_job_submitted_watched_resubmitted_merged(
    on_slurm: PrepareConfig,
    config: PrepareConfig,
    slurm: Slurm,
    contents: Callable[[str], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(config.out).parent)
    on_slurm = replace(on_slurm, input=["input"], out="out")
    said = pending(on_slurm)
    assert "3 of 3 tasks submitted as Slurm job 101: run the same command again" in said
    (script,) = slurm.scripts()
    for line in ("--partition=cpu", "--time=00:10:00", "--array=0-1", "--job-name=groundlm-"):
        assert f"#SBATCH {line}" in script
    assert "job 101 is at work, 0 of 3 tasks done" in pending(on_slurm)
    slurm.run_script(101, 0)
    for same in (on_slurm, replace(on_slurm, executor="local", executor_options={}, workers=2)):
        assert "job 101 is at work, 2 of 3 tasks done" in pending(same)
    with pytest.raises(WorkInterrupted, match=r"for another request.* \(scancel 101\)"):
        prepare(replace(on_slurm, seed=2))

    slurm.end(101)  # with a task that never ran
    said = pending(on_slurm)
    assert said.startswith("the last Slurm job ended with 2 of 3 tasks done; 1 of 3 tasks subm")
    assert "as Slurm job 102" in said
    assert "--array=0-0" in slurm.scripts()[1]
    slurm.run_here(102, 0, monkeypatch)
    slurm.end(102)
    manifest = prepare(on_slurm)
    assert len(slurm.scripts()) == 2
    local = replace(config, input=["input"], out="local")
    assert prepare(local) == manifest
    assert contents("local") == contents("out")


def test_slurm_that_does_not_answer_stops_without_loss(
    on_slurm: PrepareConfig, slurm: Slurm
) -> None:
    (slurm.folder / "refuse").touch()
    with pytest.raises(WorkInterrupted, match=r"sbatch has not taken the job: .*exit status 3"):
        prepare(on_slurm)
    (slurm.folder / "silent").touch()
    with pytest.raises(WorkInterrupted, match=r"squeue cannot say .*: slurm_load_jobs: no contact"):
        prepare(on_slurm)
    assert Path(f"{on_slurm.out}.partial", "scratch", "tokenizer.json").is_file()
    (slurm.folder / "silent").unlink()
    (slurm.folder / "refuse").unlink()
    assert "3 of 3 tasks submitted as Slurm job 101" in pending(on_slurm)


class Call:
    """A method of a Ray actor: `.remote(...)` calls it at once; the error waits for `get`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        try:
            result = self.function(*arguments)
        except Exception as error:
            failed = error

            def get() -> Any:
                raise failed

            return get
        return lambda: result


class Actor:
    """Stands for datatrove's RankWorker, which would start processes."""

    def __init__(self) -> None:
        self.get_node_ip = Call(lambda: "127.0.0.1")
        self.run_for_rank = Call(self._run_for_rank)

    @staticmethod
    def _run_for_rank(executor: Any, ranks: list[int], ips: list[str], node: int) -> None:
        for rank in ranks:
            executor._run_for_rank(rank)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a module `ray` in place; the list fills with the options of the tasks."""
    asked: list[dict[str, Any]] = []

    def options(**given: Any) -> Any:
        asked.append(given)
        return types.SimpleNamespace(remote=Actor)

    group = types.SimpleNamespace(ready=lambda: lambda: None)
    errors = ("ObjectLostError", "RayActorError", "TaskCancelledError", "WorkerCrashedError")
    exceptions = types.ModuleType("ray.exceptions")
    for name in errors:
        setattr(exceptions, name, type(name, (Exception,), {}))
    ray = types.ModuleType("ray")
    ray.__spec__ = types.SimpleNamespace(name="ray")  # type: ignore[assignment]
    ray.__dict__.update(
        put=lambda value: value,
        get=lambda value: [one() for one in value] if isinstance(value, list) else value(),
        wait=lambda tasks, num_returns, timeout: (tasks[:num_returns], tasks[num_returns:]),
        remote=lambda cls: types.SimpleNamespace(options=options),
        kill=lambda worker: None,
        cancel=lambda task: None,
        util=types.SimpleNamespace(
            placement_group=lambda bundles: group, remove_placement_group=lambda group: None
        ),
        exceptions=exceptions,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.setattr(datatrove_ray, "check_required_dependencies", lambda *given: None)
    return asked


def test_ray_makes_the_same_bytes(
    config: PrepareConfig,
    fake_ray: list[dict[str, Any]],
    contents: Callable[[str], dict[str, bytes]],
) -> None:
    prepare(config)
    options = {"cpus_per_task": 3, "tasks_per_job": 2, "workers": 1}
    out = config.out + "2"
    prepare(replace(config, out=out, executor="ray", executor_options=options))
    assert [given["num_cpus"] for given in fake_ray] == [3, 3]
    assert contents(config.out) == contents(out)


def test_failed_ray_task_is_named_and_the_rest_kept(
    config: PrepareConfig, fake_ray: list[dict[str, Any]], jsonl_folder: Path
) -> None:
    (jsonl_folder / "9.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(WorkInterrupted) as caught:
        prepare(replace(config, executor="ray", executor_options={"workers": 1}))
    said = str(caught.value)
    assert said.startswith("3 of 4 tasks done on Ray (task 3: UserError: input file '")
    assert "9.parquet' cannot be read" in said
    assert said.endswith("run again to continue")
    assert "\n" not in said
    record = Path(f"{config.out}.partial", "scratch", "request.json")
    assert json.loads(record.read_text())


def test_executors_and_options_are_checked_by_name(
    config: PrepareConfig, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    for executor, options, said in (
        ("slurm", {"partitoin": "cpu"}, "no option 'partitoin' (did you mean partition?)"),
        ("slurm", {"logging_dir": "x"}, "logging_dir is set by prepare itself"),
        ("slurm", {"partition": "cpu"}, "slurm needs --executor-options.time"),
        ("slurm", {}, "--executor-options.time and --executor-options.partition"),
        ("ray", {"partition": "cpu"}, "ray has no option 'partition'"),
        ("ray", {}, "needs the package ray (pip install ray)"),
        ("local", {"time": "1"}, "--executor-options.time is for --executor slurm or ray"),
        ("dask", {}, "--executor 'dask' is none of local, slurm, ray"),
    ):
        with pytest.raises(UserError) as caught:
            prepare(replace(config, executor=executor, executor_options=options))
        assert said in str(caught.value)
    with pytest.raises(UserError, match=r"name --executor-options\.workers"):
        prepare(replace(config, executor="ray", workers=2))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch on this machine"):
        prepare(replace(config, executor="slurm", executor_options=SLURM_OPTIONS))
    assert not Path(f"{config.out}.partial").exists()
