"""`groundlm train`, `eval` and `generate` on every baseline."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from groundlm.cli import main
from groundlm.data.windows import TokenSplit, TrainingWindows
from groundlm.models import build_model
from groundlm.training.loop import run_train
from groundlm.training.settings import model_sizes
from helpers import last_tensors, losses


@pytest.fixture
def config(sizes, train_config):
    """A run of the baseline; the vocabulary is the data's."""
    own = {k: v for k, v in sizes.items() if k != "vocab_size"}

    def build(out, **values):
        return replace(train_config(out, **values), model=own)

    return build


def test_first_loss_is_the_cross_entropy_of_the_next_tokens(config, tmp_path):
    run = config("run", training__steps=1)
    run_train(run)
    split = TokenSplit.open(run.data.path, "train")
    inputs_BT, targets_BT = TrainingWindows(split, 16, 4, seed=1).batch(0)
    model = build_model(model_sizes(run, split), seed=1)
    logits = model(input_ids=inputs_BT, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten()).item()
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - math.log(split.vocab_size)) < 1


def test_it_learns_and_resumes_bit_for_bit(config, tmp_path):
    run_train(config("straight", training__steps=12))
    run_train(config("pieces", training__steps=12, training__stop_at=5))
    run_train(config("pieces", training__steps=12))
    assert last_tensors(tmp_path / "pieces") == last_tensors(tmp_path / "straight")
    curve = losses(tmp_path / "straight")
    assert curve[12] < curve[1] - 0.3


def test_micro_batches_add_up(config, tmp_path):
    run_train(config("whole", training__steps=1))
    run_train(config("parts", training__steps=1, training__micro_batch_size=3))
    whole, parts = (losses(tmp_path / name)[1] for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-5)


def test_eval_and_generate(config, token_data, tmp_path, capsys):
    model = run_train(config("run", training__steps=3))["checkpoint"]
    capsys.readouterr()
    assert main(["eval", "--model", model, "--data", str(token_data)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["perplexity"] == pytest.approx(math.exp(result["nats_per_token"]))
    assert 0 < result["nats_per_token"] < math.log(300) + 1

    prompts = ["the state memory reads a token and", "of"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n")
    options = ["--temperature", "0", "--max-new-tokens", "9"]
    assert main(["generate", "--model", model, "--prompts-file", str(path), *options]) == 0
    together = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    for prompt, text in zip(prompts, together, strict=True):
        assert main(["generate", "--model", model, "--prompt", prompt, *options]) == 0
        assert capsys.readouterr().out.removesuffix("\n") == prompt + text


def test_bf16_trains(config, tmp_path):
    figures = run_train(config("run", training__steps=2, training__precision="bf16"))
    assert figures["skipped_steps"] == 0
    assert torch.isfinite(torch.tensor(list(losses(tmp_path / "run").values()))).all()
