"""Two real processes under torchrun against one."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from groundlm import UserError
from groundlm.training.checkpoint import checkpoints
from groundlm.training.distributed import Ranks
from groundlm.training.loop import run_train
from helpers import ONE_THREAD, losses, metrics, train_command


def torchrun(config, path, ranks=2):
    python, *command = train_command(config, path)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [python, *launcher, *command]


def run_ranks(config, path, ranks=2):
    return subprocess.run(
        torchrun(config, path, ranks),
        capture_output=True, text=True, env=ONE_THREAD, check=False, timeout=180,
    )  # fmt: skip


def assert_close_weights(a, b):
    first = load_file(checkpoints(a)[-1] / "model.safetensors")
    second = load_file(checkpoints(b)[-1] / "model.safetensors")
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-6, rtol=0, msg=name)


# A batch of 5 is not divisible by 2 ranks, nor are the corpus's windows by the batch. AdamW's eps
# is large here, so that its first steps do not blow rounding up to the size of the learning rate.
SETTINGS = {
    "training__batch_size": 5,
    "training__steps": 6,
    "training__eval_every": 3,
    "training__micro_batch_size": 2,
    "data__window_tokens": 256,
    "optimizer__eps": 1e-3,
}


def test_two_ranks_are_one_process(train_config, tmp_path):
    run_train(train_config("one", **SETTINGS))
    result = run_ranks(train_config("two", **SETTINGS), tmp_path / "c.yaml")
    assert result.returncode == 0, result.stderr
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() == set(range(1, 7))
    assert list(two.values()) == pytest.approx(list(one.values()), abs=1e-6)
    assert_close_weights(tmp_path / "one", tmp_path / "two")
    assert result.stdout.count("step 6,") == 1  # one writer
    heldout = [
        [r for r in metrics(tmp_path / name) if "heldout_nats_per_token" in r]
        for name in ("one", "two")
    ]
    for a, b in zip(*heldout, strict=True):
        assert a["heldout_nats_per_token"] == pytest.approx(b["heldout_nats_per_token"], abs=1e-6)


def test_ranks_resume_exactly_and_refuse_another_number(train_config, tmp_path):
    settings = SETTINGS | {"training__carry_state": True, "data__window_tokens": 32}
    run_ranks(train_config("straight", **settings), tmp_path / "a.yaml")
    for stop in (2, 6):
        config = train_config("broken", training__stop_at=stop, **settings)
        result = run_ranks(config, tmp_path / "b.yaml")
        assert result.returncode == 0, result.stderr
    straight, broken = (checkpoints(tmp_path / n)[-1] for n in ("straight", "broken"))
    for name in ("model.safetensors", "training/state.safetensors"):
        assert (straight / name).read_bytes() == (broken / name).read_bytes()
    one = train_config("straight", **settings)
    with pytest.raises(UserError, match=r"training.ranks = 2, not 1"):
        run_train(one)
    allowed = train_config("straight", training__regroup=True, **settings)
    assert run_train(allowed)["step"] == 6


def test_a_signal_on_one_rank_stops_all(train_config, tmp_path):
    config = train_config("two", **SETTINGS | {"training__steps": 100_000})
    process = subprocess.Popen(
        torchrun(config, tmp_path / "c.yaml"), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=ONE_THREAD,
    )  # fmt: skip
    children: list[int] = []
    for line in process.stderr:
        if re.match(r"step 3/", line):
            listing = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True,
                check=True,
            )  # fmt: skip
            children = sorted(map(int, listing.stdout.split()))
            os.kill(children[-1], signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "stopped by a signal" in out
    assert len(checkpoints(tmp_path / "two")) == 1
    time.sleep(0.5)
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


FAULTS = {
    "device": ({"training__device": "cuda:7"}, 2, "device 'cuda:7' is not available"),
    "rows": ({"training__batch_size": 1}, 2, "batch_size 1 is less than the 2 ranks"),
    "rate": ({"optimizer__learning_rate": 3e38}, 3, "not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_said_once_and_ends_all_ranks(train_config, tmp_path, fault):
    change, code, said = FAULTS[fault]
    settings = SETTINGS | {"training__steps": 100, "training__max_skipped_steps": 2} | change
    result = run_ranks(train_config("two", **settings), tmp_path / "c.yaml")
    assert result.returncode == 1  # torchrun's own
    own = [line for line in result.stderr.splitlines() if line.startswith("groundlm train:")]
    assert len(own) == 1
    assert said in own[0]
    assert result.stderr.count(f"exitcode  : {code} ") == 2 or f"exitcode: {code}" in result.stderr
    assert "groundlm/" not in result.stderr  # no traceback of ours


def test_disk_full_under_two_ranks(train_config, tmp_path):
    settings = SETTINGS | {"training__save_every": 2}
    run_ranks(train_config("two", training__stop_at=2, **settings), tmp_path / "a.yaml")
    command = torchrun(train_config("two", **settings), tmp_path / "b.yaml")
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command]
    result = subprocess.run(
        limited, capture_output=True, text=True, env=ONE_THREAD, check=False, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr.count("step-000004 could not be written") == 1
    assert [c.name for c in checkpoints(tmp_path / "two")] == ["step-000002"]


def test_damaged_data_of_one_rank_are_named_by_it(train_config, token_data, tmp_path):
    """As on a second machine with its own copy: each rank reads the folder of its number."""
    for rank in (0, 1):
        shutil.copytree(token_data, tmp_path / f"data{rank}")
    (tmp_path / "data1" / "train" / "000_train.ds").write_bytes(b"")
    path = tmp_path / "c.yaml"
    launcher = torchrun(train_config("two", **SETTINGS), path)[:-5]
    script = tmp_path / "rank.sh"
    arguments = f"train --config {path} --data.path {tmp_path}/data$RANK"
    script.write_text(f"exec {sys.executable} -m groundlm {arguments}\n")
    result = subprocess.run(
        [*launcher, "--no-python", "bash", str(script)],
        capture_output=True, text=True, env=ONE_THREAD, check=False, timeout=120,
    )  # fmt: skip
    own = [line for line in result.stderr.splitlines() if line.startswith("groundlm train:")]
    assert len(own) == 1
    assert "data1/train/000_train.ds' has 0 bytes" in own[0]


def test_a_numbered_gpu_is_kept_alone_and_refused_under_ranks():
    assert Ranks().device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert Ranks(1, 2, 1).device(torch.device("cuda")) == torch.device("cuda:1")
    with pytest.raises(UserError, match="cuda:1: under torchrun each rank takes its own GPU"):
        Ranks(1, 2, 1).device(torch.device("cuda:1"))


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK"])
def test_half_an_environment_is_refused(monkeypatch, missing):
    for name in {"RANK", "LOCAL_RANK"} - {missing}:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start several processes with torchrun"):
        Ranks.join("cpu")


@pytest.mark.parametrize(("count", "world"), [(5, 2), (8, 3), (3, 3)])
def test_shares_are_the_whole_without_overlap(count, world):
    parts = [list(Ranks(r, world).share(count)) for r in range(world)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_fewer_rows_than_ranks_are_refused():
    with pytest.raises(UserError, match="batch_size 2 is less than the 3 ranks"):
        Ranks(0, 3).share(2)
