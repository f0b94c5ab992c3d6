"""Training end to end on a tiny corpus: learning, accumulation, resuming, refusals."""

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from groundlm import UserError
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.data.tokenizer import train_tokenizer
from groundlm.training import loop
from groundlm.training.checkpoint import checkpoints
from groundlm.training.loop import run_train
from groundlm.training.runfolder import held
from groundlm.training.step import BatchGradient
from helpers import ONE_THREAD, last_tensors, losses, train_command, write_documents


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run)[-1] / "model.safetensors")


def test_loss_falls_below_the_unigram_entropy(train_config, token_data, tmp_path):
    from groundlm.data.windows import TokenSplit

    figures = run_train(train_config(training__steps=150, training__batch_size=8))
    counts = TokenSplit.open(token_data, "train").unigram_counts()
    share = torch.from_numpy(counts[counts > 0] / counts.sum())
    assert figures["heldout_nats_per_token"] < 0.8 * float(-(share * share.log()).sum())
    assert figures["tokens"] == 150 * 8 * 16
    assert losses(tmp_path / "run")[1] == pytest.approx(5.7, abs=0.3)  # near ln 300 at the start


def test_micro_batches_add_up_to_the_batch(train_config, tmp_path):
    # With AdamW's usual eps its first steps blow rounding up to the size of the learning rate.
    run_train(train_config("whole", optimizer__eps=1e-3))
    run_train(train_config("parts", optimizer__eps=1e-3, training__micro_batch_size=2))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-6, rtol=0)


def test_resumed_run_is_the_straight_run_bit_for_bit(train_config, tmp_path):
    straight = train_config("straight")
    run_train(straight)
    for stop in (3, 4, 7, 10):
        broken = train_config("broken", training__stop_at=stop)
        assert run_train(broken)["step"] == stop
    assert losses(tmp_path / "broken") == losses(tmp_path / "straight")
    assert last_tensors(tmp_path / "broken") == last_tensors(tmp_path / "straight")


def test_evaluating_and_saving_do_not_change_the_run(train_config, tmp_path):
    run_train(train_config("quiet"))
    run_train(train_config("busy", training__eval_every=2, training__save_every=3))
    assert losses(tmp_path / "busy") == losses(tmp_path / "quiet")
    assert last_tensors(tmp_path / "busy") == last_tensors(tmp_path / "quiet")


def test_metrics_after_the_resumed_step_are_dropped(train_config, tmp_path):
    run_train(train_config(training__stop_at=4))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as f:
        f.write('{"step": 5, "loss_nats": 99.0}\n{"step": 6, "loss_')  # killed while writing
    run_train(train_config())
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 11))
    assert 99.0 not in losses(tmp_path / "run").values()


def test_finished_run_is_left_alone(train_config, tmp_path, capsys):
    first = run_train(train_config())
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = run_train(train_config())
    assert again == first
    assert "already stands at step 10" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training__seed": 2}, "training.seed = 1, not 2"),
        ({"training__batch_size": 3}, "training.batch_size = 4, not 3"),
        ({"training__steps": 11}, "training.steps = 10, not 11"),
        ({"optimizer__learning_rate": 0.5}, "optimizer.learning_rate = 0.01, not 0.5"),
        ({"model__state_size": 24}, "model.state_size = 20, not 24"),
        ({"data__window_tokens": 8}, "data.window_tokens = 16, not 8"),
    ],
)
def test_changed_settings_are_refused_by_name(train_config, tmp_path, change, named):
    run_train(train_config(training__stop_at=1))
    with pytest.raises(UserError, match=named):
        run_train(train_config(**change))
    assert len(losses(tmp_path / "run")) == 1


def test_what_may_change_on_resuming_may_change(train_config):
    run_train(train_config(training__stop_at=2))
    changed = {"log_every": 3, "save_every": 2, "eval_every": 5, "keep_checkpoints": 1}
    figures = run_train(train_config(**{f"training__{k}": v for k, v in changed.items()}))
    assert figures["step"] == 10


def test_only_the_newest_checkpoints_are_kept(train_config, tmp_path):
    run_train(train_config(training__save_every=2, training__keep_checkpoints=2))
    names = [p.name for p in checkpoints(tmp_path / "run")]
    assert names == ["step-000008", "step-000010"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_checkpoint_is_a_transformers_folder(train_config, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_train(train_config())
    folder = checkpoints(tmp_path / "run")[-1]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "GPNForCausalLM"
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["model"]["vocab_size"] == model.config.vocab_size == 300


@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml"])
def test_foreign_folder_is_not_touched(train_config, tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine: 1")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run_train(train_config())
    assert [p.name for p in (tmp_path / "run").iterdir()] == [name]
    assert (tmp_path / "run" / name).read_text() == "mine: 1"


def test_out_that_cannot_be_a_folder_is_named(train_config, tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/sub"):
        with pytest.raises(UserError, match=rf"training\.out .*/{out} cannot be written") as caught:
            run_train(train_config(out))
        assert caught.value.exit_code == 2


def test_a_run_is_held_by_one_process(train_config, tmp_path):
    run_train(train_config(training__stop_at=2))
    with held(tmp_path / "run"), pytest.raises(UserError, match="another process is at work in"):
        run_train(train_config())
    assert run_train(train_config())["step"] == 10


def test_data_whose_tokenizer_was_swapped_is_refused(train_config, token_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(token_data, data)
    other = train_tokenizer(["other text"], 300)
    other.save_pretrained(str(data / "tokenizer"))
    with pytest.raises(UserError, match=r"tokenizer .* has SHA-256 .*of the manifest"):
        run_train(train_config(data__path=str(data)))
    assert not (tmp_path / "run").exists()


def test_the_same_tokens_elsewhere_go_on_and_others_do_not(train_config, token_data, tmp_path):
    run_train(train_config(training__stop_at=2))
    shutil.copytree(token_data, tmp_path / "moved")
    manifest = json.loads((tmp_path / "moved" / "manifest.json").read_text())
    manifest["source"]["input"] = ["elsewhere.jsonl"]
    (tmp_path / "moved" / "manifest.json").write_text(json.dumps(manifest))
    moved = train_config(data__path=str(tmp_path / "moved"), training__stop_at=3)
    assert run_train(moved)["step"] == 3
    write_documents(tmp_path / "text.jsonl", 300, seed=1)
    tokenizer = str(token_data / "tokenizer")
    prepare(PrepareConfig([str(tmp_path / "text.jsonl")], str(tmp_path / "other"), tokenizer))
    with pytest.raises(UserError, match=r"trained with data\.sha256"):
        run_train(train_config(data__path=str(tmp_path / "other")))


def test_another_backend_is_refused_unless_allowed(train_config, tmp_path):
    run_train(train_config(training__stop_at=2))
    other = {"training__scan_backend": "reference"}
    with pytest.raises(UserError, match=r"scan_backend = fused, not reference.*regroup allows it"):
        run_train(train_config(**other))
    assert run_train(train_config(training__regroup=True, **other))["step"] == 10


def test_heldout_losses_of_other_text_are_not_compared(train_config, tmp_path, capsys):
    settings = {"training__eval_every": 2, "training__save_every": 2}
    first = run_train(train_config(training__stop_at=4, **settings))
    assert first["best_step"] == 4
    capsys.readouterr()
    figures = run_train(train_config(training__eval_windows=2, training__stop_at=5, **settings))
    assert "held-out losses are of other text" in capsys.readouterr().out
    assert figures["best_step"] == 5


def test_signal_in_the_last_step_leaves_nothing_to_continue(train_config, monkeypatch):
    real = BatchGradient.add

    def add(self, step):
        if step == 9:
            signal.raise_signal(signal.SIGTERM)
        return real(self, step)

    monkeypatch.setattr(BatchGradient, "add", add)
    assert run_train(train_config())["interrupted_by"] is None


def test_another_number_of_threads_is_said(train_config, capsys):
    run_train(train_config(training__stop_at=2))
    torch.set_num_threads(2)
    try:
        run_train(train_config(training__stop_at=3))
    finally:
        torch.set_num_threads(1)
    assert "threads was 1, is 2: equal to rounding" in capsys.readouterr().out


def test_evaluation_between_ragged_micro_batches(train_config, tmp_path):
    """What a held-out evaluation leaves in the scan's buffers never enters a training step."""
    ragged = {"training__batch_size": 5, "training__micro_batch_size": 3}
    run_train(train_config("quiet", **ragged))
    run_train(train_config("busy", training__eval_every=1, training__eval_windows=2, **ragged))
    assert last_tensors(tmp_path / "quiet") == last_tensors(tmp_path / "busy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training__steps": 0}, "training.steps is 0"),
        ({"training__truncate_tokens": 0}, "training.truncate_tokens is 0"),
        ({"training__ema_decay": 1.5}, "training.ema_decay is 1.5"),
        ({"training__ema_decay": 1.0}, "training.ema_decay is 1.0: it must be .* below 1"),
        ({"optimizer__beta2": 1.0}, "optimizer.beta2 is 1.0: it must be .* below 1"),
        ({"optimizer__eps": 0.0}, "optimizer.eps is 0.0: it must be above 0"),
        ({"optimizer__learning_rate": float("inf")}, "optimizer.learning_rate is inf"),
        ({"optimizer__weight_decay": float("nan")}, "optimizer.weight_decay is nan"),
        ({"model__eos_token_id": 7}, "model.eos_token_id is 7, the tokens .* have 0"),
        ({"model__vocab_size": 7}, "model.vocab_size is 7, the tokens .* have 300"),
        (
            {"model__stat_size": 7},
            r"unknown key model.stat_size \(did you mean model.state_size\?\)",
        ),
        ({"model__model_type": "gpm"}, "unknown model_type 'gpm'"),
        ({"data__window_tokens": 10**6}, "a window of 1,000,000 needs 1,000,001"),
        ({"training__seed": -1}, "training.seed is -1"),
        ({"training__device": "tpu9"}, "device 'tpu9' is not available"),
        ({"training__device": "meta"}, "device 'meta' is not available"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    train_config, tmp_path, change, message
):
    with pytest.raises(UserError, match=message):
        run_train(train_config(**change))
    assert not (tmp_path / "run").exists()


def test_bf16_and_another_architecture_train(train_config):
    config = train_config("bf16", training__precision="bf16", training__steps=3)
    assert run_train(config)["step"] == 3
    sizes = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
             "num_hidden_layers": 1, "num_attention_heads": 2,
             "tie_word_embeddings": True}  # fmt: skip
    llama = replace(train_config("llama", training__steps=3), model=sizes)
    assert run_train(llama)["step"] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_the_current_step_and_the_run_goes_on(train_config, tmp_path, number):
    run_train(train_config("straight", training__steps=100))
    config = train_config("stopped", training__steps=100)
    command = train_command(config, tmp_path / "config.yaml")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ONE_THREAD)
    for line in process.stderr:
        if line.startswith("step 5/"):
            process.send_signal(number)
            break
    process.stderr.read()
    assert process.wait(60) == 128 + number
    stopped = json.loads(
        (checkpoints(tmp_path / "stopped")[-1] / "training/progress.json").read_text()
    )["step"]
    assert 5 <= stopped < 100
    assert run_train(config)["step"] == 100
    assert last_tensors(tmp_path / "stopped") == last_tensors(tmp_path / "straight")


def test_signal_while_evaluating_is_heeded(train_config, monkeypatch, tmp_path):
    run_train(train_config("straight"))
    real = loop.Run._heldout

    def heldout(self):
        if self.step == 4:
            signal.raise_signal(signal.SIGTERM)
        return real(self)

    monkeypatch.setattr(loop.Run, "_heldout", heldout)
    stopped = run_train(train_config("stopped", training__eval_every=2))
    assert stopped["interrupted_by"] == signal.SIGTERM
    assert stopped["step"] == 5
    monkeypatch.undo()
    assert run_train(train_config("stopped", training__eval_every=2))["step"] == 10
    assert last_tensors(tmp_path / "stopped") == last_tensors(tmp_path / "straight")


def test_second_signal_interrupts_at_once(train_config, monkeypatch):
    real = BatchGradient.add

    def add(self, step):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return real(self, step)

    monkeypatch.setattr(BatchGradient, "add", add)
    before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background job
    with pytest.raises(KeyboardInterrupt):
        run_train(train_config())
    assert signal.getsignal(signal.SIGINT) is before
