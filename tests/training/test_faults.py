"""Stops, full disks, bad numbers, damaged and hostile checkpoint files."""

import json
import multiprocessing
import os
import subprocess
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

from groundlm import UserError
from groundlm.data.integrity import file_sha256
from groundlm.errors import RunFault
from groundlm.training import checkpoint as ckpt
from groundlm.training import loop
from groundlm.training.checkpoint import checkpoints
from groundlm.training.loop import run_train
from groundlm.training.step import BatchGradient
from helpers import ONE_THREAD, last_tensors, losses, metrics, train_command


def poison(monkeypatch, steps):
    """Makes the gradient of some steps NaN."""
    real = BatchGradient.add

    def add(self, step):
        loss = real(self, step)
        if step in steps:
            next(self._model.parameters()).grad[0, 0] = float("nan")
        return loss

    monkeypatch.setattr(BatchGradient, "add", add)


def test_non_finite_gradient_skips_the_step_and_counts_it(train_config, monkeypatch, tmp_path):
    poison(monkeypatch, {4, 6})
    figures = run_train(train_config(training__ema_decay=0.9, training__save_every=5))
    assert figures["skipped_steps"] == 2
    for path in checkpoints(tmp_path / "run")[-1].rglob("model.safetensors"):
        assert all(t.isfinite().all() for t in load_file(path).values())
    loss = losses(tmp_path / "run")
    assert [step for step, value in loss.items() if value is None] == [5, 7]


def test_skipping_survives_resuming(train_config, monkeypatch, tmp_path):
    poison(monkeypatch, {4, 6})
    run_train(train_config("straight"))
    for stop in (5, 6, 10):
        figures = run_train(train_config("broken", training__stop_at=stop))
    assert figures["skipped_steps"] == 2
    assert last_tensors(tmp_path / "straight") == last_tensors(tmp_path / "broken")


def test_too_many_skipped_steps_end_the_run_and_keep_the_checkpoint(
    train_config, monkeypatch, tmp_path
):
    poison(monkeypatch, set(range(4, 100)))
    config = train_config(training__max_skipped_steps=3, training__save_every=4)
    with pytest.raises(RunFault, match=r"3 steps in a row.*step 7; last checkpoint: .*step-000004"):
        run_train(config)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step-000004"]
    monkeypatch.undo()
    assert run_train(config)["step"] == 10


def test_non_finite_loss_is_not_back_propagated_into_the_weights(
    train_config, monkeypatch, tmp_path
):
    real = BatchGradient.add
    monkeypatch.setattr(
        BatchGradient, "add", lambda s, step: real(s, step) * (float("inf") if step == 2 else 1)
    )
    assert run_train(train_config())["skipped_steps"] == 1
    model = load_file(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    assert all(t.isfinite().all() for t in model.values())


def test_checkpoints_stay_while_steps_are_skipped(train_config, monkeypatch, tmp_path):
    """The weights may be what is wrong: no good checkpoint makes room for a doubtful one."""
    poison(monkeypatch, set(range(3, 100)))
    settings = {"training__save_every": 1, "training__keep_checkpoints": 1}
    with pytest.raises(RunFault):
        run_train(train_config(training__max_skipped_steps=5, **settings))
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [3]
    # At its last step a run is saved in any case, beside the good one.
    run_train(train_config(training__stop_at=6, **settings))
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [3, 6]
    monkeypatch.undo()
    assert run_train(train_config(**settings))["step"] == 10
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [10]


def test_a_run_of_skipped_steps_only_goes_on(train_config, monkeypatch, tmp_path):
    run_train(train_config("straight"))
    poison(monkeypatch, {0, 1, 2})
    run_train(train_config(training__stop_at=3))
    monkeypatch.undo()
    assert run_train(train_config())["step"] == 10
    poison(monkeypatch, {0, 1, 2})
    run_train(train_config("unbroken"))
    assert last_tensors(tmp_path / "run") == last_tensors(tmp_path / "unbroken")


def test_weights_that_are_not_finite_are_not_saved(train_config, monkeypatch, tmp_path):
    real = loop.Optimizers.step

    def step(self, rate):
        norm = real(self, rate)
        if len(calls) == 3:
            self.parameters[0].data[0, 0] = float("inf")
        calls.append(norm)
        return norm

    calls = []
    monkeypatch.setattr(loop.Optimizers, "step", step)
    with pytest.raises(RunFault, match=r"not finite after step 4 \(model.embedding.weight\)"):
        run_train(train_config(training__save_every=2))
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [2]


def test_heldout_loss_that_is_no_number_is_never_the_best(train_config, monkeypatch, tmp_path):
    scores = iter([float("nan"), 2.0, float("inf"), 3.0, float("nan")])
    monkeypatch.setattr(loop.Run, "_heldout", lambda self: next(scores))
    figures = run_train(
        train_config(training__save_every=2, training__eval_every=2, training__keep_checkpoints=1)
    )
    assert (figures["best_heldout_nats_per_token"], figures["best_step"]) == (2.0, 4)
    assert figures["heldout_nats_per_token"] is None
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [4, 10]
    heldout = [
        r["heldout_nats_per_token"] for r in metrics(tmp_path / "run") if "heldout" in str(r)
    ]
    assert heldout == [None, 2.0, None, 3.0, None]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def unreadable(checkpoint):
    """Reading from address 0 of this process is an input/output error."""
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").symlink_to("/proc/self/mem")


DAMAGES = [
    (lambda c: (c / "model.safetensors").write_bytes(b""), "model.safetensors (0 bytes) is dam"),
    (lambda c: flip(c / "model.safetensors"), "model.safetensors"),
    (lambda c: flip(c / "training/progress.json"), "training/progress.json"),
    (lambda c: (c / "training/optimizer.safetensors").unlink(), "optimizer.safetensors is mis"),
    (lambda c: (c / "training/complete.json").unlink(), "complete.json is missing"),
    (lambda c: (c / "training/complete.json").write_text("5"), "complete.json is missing or dam"),
    (lambda c: (c / "training/complete.json").write_bytes(b"\xff"), "complete.json is missing"),
    (lambda c: (c / "config.json").unlink(), "config.json is missing"),
    (unreadable, "config.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_damaged_newest_checkpoint_is_passed_over_and_said(
    train_config, tmp_path, capsys, damage, said
):
    run_train(train_config("straight"))
    run_train(train_config(training__save_every=3, training__stop_at=8))
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [6, 8]
    (tmp_path / "run" / "checkpoints" / "step-000007-backup").mkdir()
    damage(checkpoints(tmp_path / "run")[-1])
    capsys.readouterr()
    # The damaged one takes no good one's place among those that are kept.
    run_train(train_config(training__save_every=1, training__stop_at=7))
    out = capsys.readouterr().out
    assert "passing over" in out
    assert said in out
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [6, 7]
    assert (tmp_path / "run" / "checkpoints" / ".damaged-step-000008").is_dir()
    assert run_train(train_config())["step"] == 10
    assert last_tensors(tmp_path / "run") == last_tensors(tmp_path / "straight")


def test_run_whose_checkpoints_are_all_damaged_does_not_start_again(train_config, tmp_path):
    run_train(train_config(training__stop_at=2))
    flip(checkpoints(tmp_path / "run")[-1] / "model.safetensors")
    for _ in range(2):  # a scheduler tries again by itself
        with pytest.raises(UserError, match="holds no undamaged checkpoint"):
            run_train(train_config())
    assert len(losses(tmp_path / "run")) == 2


def sign(path):
    """Make a changed optimizer file the one that the checkpoint says it has."""
    marker = path.with_name("complete.json")
    sums = json.loads(marker.read_text())
    marker.write_text(json.dumps(sums | {f"training/{path.name}": file_sha256(path)}))


def test_optimizer_tensor_of_the_right_size_and_wrong_shape_is_named(train_config, tmp_path):
    from safetensors.torch import save_file

    run_train(train_config(training__stop_at=2))
    path = checkpoints(tmp_path / "run")[-1] / "training" / "optimizer.safetensors"
    tensors = load_file(path)
    name = "model.embedding.weight.exp_avg"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, path)
    sign(path)
    with pytest.raises(
        UserError, match=r"model\.embedding\.weight\.exp_avg is of shape \(12, 300\)"
    ):
        run_train(train_config())


def test_no_pickle_is_ever_loaded(train_config, tmp_path):
    import pickle

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    run_train(train_config(training__stop_at=2))
    folder = checkpoints(tmp_path / "run")[-1]
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} == {".json", ".safetensors"}
    path = folder / "training" / "optimizer.safetensors"
    path.write_bytes(pickle.dumps(Payload()))
    sign(path)
    with pytest.raises(UserError, match=r"optimizer\.safetensors cannot be read"):
        run_train(train_config())
    assert not (tmp_path / "touched").exists()


def test_kept_checkpoints_are_the_newest_the_best_and_every_kth(
    train_config, tmp_path, monkeypatch
):
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(loop.Run, "_heldout", lambda self: next(scores))
    run_train(
        train_config(
            training__save_every=2,
            training__eval_every=2,
            training__keep_checkpoints=1,
            training__keep_every=6,
        )
    )
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [4, 6, 10]


def test_disk_full_keeps_the_last_checkpoint_and_the_run_goes_on(train_config, tmp_path):
    run_train(train_config("straight", training__steps=6))
    config = train_config(training__steps=6, training__save_every=2)
    run_train(train_config(training__steps=6, training__save_every=2, training__stop_at=2))
    command = train_command(config, tmp_path / "c.yaml")
    # 20 KiB: enough for the logs, too little for the weights.
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command]
    result = subprocess.run(limited, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert result.returncode == 3, result.stderr
    assert "step-000004 could not be written" in result.stderr
    assert "last whole one" in result.stderr
    assert "Traceback" not in result.stderr
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [2]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert run_train(config)["step"] == 6
    assert last_tensors(tmp_path / "run") == last_tensors(tmp_path / "straight")


def test_disk_full_in_the_metrics_is_said(train_config, tmp_path):
    settings = {"training__steps": 400, "training__save_every": 3}
    command = train_command(train_config(**settings), tmp_path / "c.yaml")
    run_train(train_config(training__stop_at=3, **settings))
    (tmp_path / "run" / "metrics.jsonl").open("ab").write(b"x" * 60_000 + b"\n")
    before = checkpoints(tmp_path / "run")
    # 70 KiB: the checkpoints fit, the metrics grow past it (one line without end is dropped).
    limited = ["bash", "-c", 'ulimit -f 70; exec "$@"', "bash", *command]
    result = subprocess.run(limited, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert "metrics.jsonl cannot be written" in result.stderr or "could not be" in result.stderr
    assert checkpoints(tmp_path / "run") >= before
    assert run_train(train_config(**settings))["step"] == 400


def test_kill_while_saving_leaves_the_last_checkpoint(train_config, tmp_path):
    run_train(train_config("straight"))
    config = train_config(training__save_every=1)
    command = train_command(config, tmp_path / "c.yaml")
    folder = tmp_path / "run" / "checkpoints"
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ONE_THREAD)
        before = len(list(folder.glob("*")))
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if list(folder.glob(".partial-*")) or len(list(folder.glob("*"))) > before + 1:
                break
        process.kill()
        process.wait()
    (folder / ".partial-step-000099").mkdir(exist_ok=True)
    assert run_train(config)["step"] == 10
    assert not list(folder.glob(".*"))
    assert last_tensors(tmp_path / "run") == last_tensors(tmp_path / "straight")


def test_seventeen_steps_in_five_pieces_across_epochs(train_config, tmp_path):
    settings = {"training__steps": 17, "data__window_tokens": 256, "training__batch_size": 5}
    run_train(train_config("straight", **settings))
    for stop in (1, 6, 7, 12, 17):
        run_train(train_config("pieces", training__stop_at=stop, **settings))
    assert last_tensors(tmp_path / "straight") == last_tensors(tmp_path / "pieces")
    from groundlm.training.distributed import Ranks

    run = loop.Run(train_config("straight", **settings), Ranks())
    assert run.windows.num_windows < 17 * 5  # the run did cross the ends of epochs


def test_dropout_is_a_function_of_the_step(train_config, tmp_path):
    from dataclasses import replace

    sizes = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
             "num_hidden_layers": 1, "num_attention_heads": 2, "attention_dropout": 0.3,
             "tie_word_embeddings": True}  # fmt: skip
    run_train(replace(train_config("straight"), model=sizes))
    for stop in (4, 10):
        run_train(replace(train_config("broken", training__stop_at=stop), model=sizes))
    assert last_tensors(tmp_path / "straight") == last_tensors(tmp_path / "broken")
    plain = sizes | {"attention_dropout": 0.0}
    run_train(replace(train_config("plain"), model=plain))
    assert last_tensors(tmp_path / "straight") != last_tensors(tmp_path / "plain")


def kills(config, count, longest_s):
    """Start a run again and again and kill it after a random time; returns how many kills met a
    run at work, and how many of them a save."""
    folder = Path(config.training.out) / "checkpoints"
    # tqdm's own lock is shared by forks, and the one that is killed may hold it.
    tqdm.set_lock(threading.RLock())
    generator = torch.Generator().manual_seed(0)
    alive = saving = 0
    for _ in range(count):
        # Forked: a fresh process, without the seconds that a fresh interpreter takes to start.
        process = multiprocessing.get_context("fork").Process(target=silent, args=(config,))
        process.start()
        process.join(longest_s * float(torch.rand((), generator=generator)))
        alive += process.is_alive()
        process.kill()
        process.join()
        saving += bool(list(folder.glob(".partial-*")))
    return alive, saving


def silent(config):
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run_train(config)


def soak(train_config, tmp_path, steps, count, longest_s):
    settings = {"training__steps": steps, "training__save_every": 2, "training__log_every": 5}
    straight = multiprocessing.get_context("fork").Process(
        target=silent, args=(train_config("straight", **settings),)
    )
    straight.start()
    straight.join()
    config = train_config("killed", **settings)
    alive, saving = kills(config, count, longest_s)
    silent(config)
    assert last_tensors(tmp_path / "straight") == last_tensors(tmp_path / "killed")
    assert losses(tmp_path / "straight") == losses(tmp_path / "killed")
    return alive, saving


def test_killed_and_resumed_at_random(train_config, tmp_path):
    soak(train_config, tmp_path, steps=60, count=8, longest_s=1.0)


@pytest.mark.slow
def test_soak_of_two_hundred_kills(train_config, tmp_path):
    """Random kills and resumes end in the bytes of the straight run."""
    alive, saving = soak(train_config, tmp_path, steps=6000, count=200, longest_s=2.0)
    print(f"{alive} of 200 kills met a run at work, {saving} of them while it saved")
    assert alive >= 190
    assert saving >= 20
