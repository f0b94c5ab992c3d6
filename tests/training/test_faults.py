"""Stops, full disks, bad numbers, damaged and hostile checkpoint files."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from groundlm import UserError
from groundlm.errors import RunFault
from groundlm.training import checkpoint as ckpt
from groundlm.training import loop
from groundlm.training.checkpoint import checkpoints
from groundlm.training.loop import run_train
from groundlm.training.step import BatchGradient

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def command_for(config, path):
    """The command line of a configuration, for runs that are to be killed."""
    path.write_text(yaml.safe_dump(loop.asdict(config)))
    return [sys.executable, "-m", "groundlm", "train", "--config", str(path)]


def same_bytes(a, b):
    a, b = checkpoints(a)[-1], checkpoints(b)[-1]
    names = [p.relative_to(a) for p in a.rglob("*.safetensors")]
    return len(names) >= 2 and all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


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
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(x, parse_constant=pytest.fail) for x in lines.splitlines()]
    skipped = [r["step"] for r in records if r.get("loss_nats", 0) is None]
    assert skipped == [5, 7]


def test_skipping_survives_resuming(train_config, monkeypatch, tmp_path):
    poison(monkeypatch, {4, 6})
    run_train(train_config("straight"))
    for stop in (5, 6, 10):
        figures = run_train(train_config("broken", training__stop_at=stop))
    assert figures["skipped_steps"] == 2
    assert same_bytes(tmp_path / "straight", tmp_path / "broken")


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: (c / "model.safetensors").write_bytes(b""), "model.safetensors has 0 bytes"),
        (lambda c: (c / "training/optimizer.safetensors").unlink(), "optimizer.safetensors is mis"),
        (lambda c: (c / "training/complete.json").unlink(), "complete.json is missing"),
        (lambda c: (c / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_damaged_newest_checkpoint_is_passed_over_and_said(
    train_config, tmp_path, capsys, damage, said
):
    run_train(train_config("straight"))
    run_train(train_config(training__save_every=3, training__stop_at=8))
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [6, 8]
    damage(checkpoints(tmp_path / "run")[-1])
    capsys.readouterr()
    assert run_train(train_config())["step"] == 10
    out = capsys.readouterr().out
    assert "passing over" in out
    assert said in out
    assert same_bytes(tmp_path / "run", tmp_path / "straight")


def test_optimizer_tensor_of_the_right_size_and_wrong_shape_is_named(train_config, tmp_path):
    from safetensors.torch import save_file

    run_train(train_config(training__stop_at=2))
    path = checkpoints(tmp_path / "run")[-1] / "training" / "optimizer.safetensors"
    tensors = load_file(path)
    name = "model.embedding.weight.exp_avg"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, path)
    sizes = path.with_name("complete.json")
    files = json.loads(sizes.read_text())
    sizes.write_text(json.dumps(files | {"training/optimizer.safetensors": path.stat().st_size}))
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
    marker = path.with_name("complete.json")
    files = json.loads(marker.read_text())
    marker.write_text(json.dumps(files | {"training/optimizer.safetensors": path.stat().st_size}))
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
    command = command_for(config, tmp_path / "c.yaml")
    # 20 KiB: enough for the logs, too little for the weights.
    limited = ["bash", "-c", 'ulimit -f 20; exec "$@"', "bash", *command]
    result = subprocess.run(limited, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert result.returncode == 3, result.stderr
    assert "step-000004 could not be written" in result.stderr
    assert "last complete one" in result.stderr
    assert "Traceback" not in result.stderr
    assert [ckpt.step_of(c) for c in checkpoints(tmp_path / "run")] == [2]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert run_train(config)["step"] == 6
    assert same_bytes(tmp_path / "run", tmp_path / "straight")


def test_kill_while_saving_leaves_the_last_checkpoint(train_config, tmp_path):
    run_train(train_config("straight"))
    config = train_config(training__save_every=1)
    command = command_for(config, tmp_path / "c.yaml")
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
    assert same_bytes(tmp_path / "run", tmp_path / "straight")


def test_seventeen_steps_in_five_pieces_across_epochs(train_config, tmp_path):
    settings = {"training__steps": 17, "data__window_tokens": 256, "training__batch_size": 5}
    run_train(train_config("straight", **settings))
    for stop in (1, 6, 7, 12, 17):
        run_train(train_config("pieces", training__stop_at=stop, **settings))
    assert same_bytes(tmp_path / "straight", tmp_path / "pieces")
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
    assert same_bytes(tmp_path / "straight", tmp_path / "broken")
    plain = sizes | {"attention_dropout": 0.0}
    run_train(replace(train_config("plain"), model=plain))
    assert not same_bytes(tmp_path / "straight", tmp_path / "plain")


@pytest.mark.slow
def test_soak_of_two_hundred_kills(train_config, tmp_path):
    """Random kills and resumes end in the bytes of the straight run."""
    settings = {"training__steps": 4000, "training__save_every": 5, "training__log_every": 50}
    run_train(train_config("straight", **settings))
    config = train_config("killed", **settings)
    command = command_for(config, tmp_path / "c.yaml")
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=ONE_THREAD
        )
        try:
            process.wait(4 + 4 * float(torch.rand((), generator=generator)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert run_train(config)["step"] == 4000
    assert same_bytes(tmp_path / "straight", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed")
