"""Truncation, carried state and document resets against plain references written out here."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from groundlm import UserError
from groundlm.data.windows import StreamWindows, TokenSplit
from groundlm.evaluation.perplexity import heldout_nats
from groundlm.model.loading import load_model
from groundlm.models import build_model
from groundlm.training.checkpoint import checkpoints
from groundlm.training.distributed import Ranks
from groundlm.training.loop import Run, run_train
from helpers import LLAMA


def reference_loss(model, inputs, targets, state=None, resets=None):
    """Mean loss of rows read on from a state, and the state after them."""
    out = model(inputs, state=state, resets=resets)
    model.eval()
    logits = model(inputs, state=state, resets=resets).logits
    model.train()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), out.state


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def build(train_config, **settings):
    """A run in float64 with weights off their start, and an untouched copy of its model."""
    run = Run(train_config(**settings), Ranks())
    copy = build_model(run.sizes, 1).double().train()
    torch.manual_seed(0)
    for p in copy.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    run.model.double()
    run.model.load_state_dict(copy.state_dict())
    return run, copy


def assert_same_gradient(run, copy):
    expected = gradients(copy)
    for name, grad in gradients(run.model).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-10, rtol=0, msg=name)
    run.model.zero_grad()
    copy.zero_grad()


@pytest.mark.parametrize("micro", [None, 3])
def test_truncation_cuts_the_gradient_and_not_the_state(train_config, micro):
    run, copy = build(train_config, training__truncate_tokens=6, training__micro_batch_size=micro)
    loss = run.gradient.add(0)
    inputs, targets = run.windows.batch(0)
    state, total = None, 0.0
    for part in (slice(0, 6), slice(6, 12), slice(12, 16)):
        part_loss, state = reference_loss(copy, inputs[:, part], targets[:, part], state)
        part_loss = part_loss / targets.numel()
        part_loss.backward()
        total += float(part_loss.detach())
        state = state.detach()
    assert loss == pytest.approx(total, abs=1e-12)
    assert_same_gradient(run, copy)
    # Cutting must matter, or the test shows nothing.
    run.gradient.add(0)
    whole, _ = reference_loss(copy, inputs, targets)
    (whole / targets.numel()).backward()
    differ = [
        not torch.allclose(a, b, atol=1e-9)
        for a, b in zip(gradients(run.model).values(), gradients(copy).values(), strict=True)
    ]
    assert any(differ)
    assert float(whole.detach() / targets.numel()) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("micro", [None, 3])
def test_carried_state_starts_the_next_window_of_the_row(train_config, micro):
    run, copy = build(train_config, training__carry_state=True, training__micro_batch_size=micro)
    state, last = None, None
    for step in range(3):
        inputs, targets = run.windows.batch(step)
        if last is not None:
            assert torch.equal(inputs[:, 0], last)  # rows run on: last target is first input
        last = targets[:, -1]
        loss = run.gradient.add(step)
        expected, state = reference_loss(copy, inputs, targets, state)
        (expected / targets.numel()).backward()
        assert loss == pytest.approx(float(expected / targets.numel()), abs=1e-12)
        assert_same_gradient(run, copy)
        state = state.detach()


def test_streams_restart_from_zero_and_cover_the_corpus(token_data):
    windows = StreamWindows(TokenSplit.open(token_data, "train"), 16, 4, seed=3)
    length = windows.stretch_windows
    assert [s for s in range(2 * length + 1) if windows.restarts(s)] == [0, length, 2 * length]
    seen = [windows.window_at(s * 4 + r) for s in range(length) for r in range(4)]
    assert len(set(seen)) == 4 * length
    assert set(seen) <= set(range(windows.num_windows))
    again = StreamWindows(TokenSplit.open(token_data, "train"), 16, 4, seed=3)
    assert again.window_at(777) == windows.window_at(777)


def test_documents_are_read_after_their_end_token_alone(train_config, token_data):
    run, copy = build(
        train_config, data__reset_at_documents=True, data__window_tokens=64, training__batch_size=2
    )
    eos = TokenSplit.open(token_data, "train").eos_token_id
    step = next(s for s in range(50) if (run.windows.batch(s)[0][:, 1:] == eos).any())
    loss = run.gradient.add(step)
    inputs, targets = run.windows.batch(step)
    total = 0.0
    for row, wanted in zip(inputs, targets, strict=True):
        cuts = [0, *[i for i in range(1, 64) if row[i] == eos], 64]
        for a, b in pairwise(cuts):
            part, _ = reference_loss(copy, row[None, a:b], wanted[None, a:b])
            (part / targets.numel()).backward()
            total += float(part) / targets.numel()
    assert loss == pytest.approx(total, abs=1e-12)
    assert_same_gradient(run, copy)


@pytest.mark.parametrize(
    "settings",
    [
        {"training__carry_state": True},
        {"training__truncate_tokens": 5, "data__reset_at_documents": True},
        {"training__ema_decay": 0.9},
        {"optimizer__name": "muon", "optimizer__schedule": "linear_to_zero"},
    ],
    ids=lambda s: "+".join(s),
)
def test_resuming_is_exact_with_every_choice(train_config, tmp_path, settings):
    run_train(train_config("straight", **settings))
    for stop in (3, 7, 10):
        run_train(train_config("broken", training__stop_at=stop, **settings))
    straight, broken = (checkpoints(tmp_path / name)[-1] for name in ("straight", "broken"))
    files = [p.relative_to(straight) for p in straight.rglob("*.safetensors")]
    assert len(files) == 2 + ("training__carry_state" in settings) + (
        "training__ema_decay" in settings
    )
    for name in files:
        assert (straight / name).read_bytes() == (broken / name).read_bytes(), name


def test_averaged_weights_are_scored_and_saved_as_a_model(train_config, tmp_path):
    from transformers import AutoModelForCausalLM

    run_train(train_config(training__ema_decay=0.5, training__eval_every=5))
    folder = checkpoints(tmp_path / "run")[-1]
    own = AutoModelForCausalLM.from_pretrained(folder)
    average = AutoModelForCausalLM.from_pretrained(folder / "ema")
    assert not torch.equal(own.model.embedding.weight, average.model.embedding.weight)
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    scores = [r for r in records if "heldout_ema_nats_per_token" in r]
    assert len(scores) == 2
    assert scores[0]["heldout_ema_nats_per_token"] != scores[0]["heldout_nats_per_token"]


def test_state_norm_retention_and_memory_effect_are_logged(train_config, tmp_path):
    from groundlm.model import cell
    from groundlm.training.probe import probe

    run_train(train_config(training__steps=2))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert 0 < record["mean_retention"] < 1
    assert record["memory_effect"] > 0
    run = Run(train_config("other"), Ranks())
    ids = run.windows.batch(0)[0]
    figures = probe(run.model.model, ids)
    out = run.model.model(ids[:4])
    norms = out.last_hidden_state.norm(dim=-1)
    assert figures["state_norm"] == pytest.approx(float(norms.mean()), rel=1e-5)
    # One token by hand: the first step of the first row.
    model, p = run.model.model, run.model.model.cell_params()
    token = cell.token_contribution(
        model.embedding(ids[:1, :1]), model.ground.token_norm.weight,
        model.ground.token_proj.weight, p.norm_eps,
    )[:, 0]  # fmt: skip
    zero = model.zero_state(1)
    grounded = cell.ground(token, zero.predicted_BD, p.ground, p.norm_eps)
    vectors = cell.write_vectors(zero.grounded_BD, grounded, p.memory, p.norm_eps)
    memory = cell.write(zero.memory_BHKV, vectors)
    read = cell.read(grounded, memory, p.predict[0].read, p.norm_eps)
    rest = cell.predict(grounded, None, p.predict[0], p.norm_eps)
    one = probe(model, ids[:1, :1])
    assert one["memory_effect"] == pytest.approx(float(read.norm() / rest.norm()), rel=1e-5)
    retention = vectors.log_decay_BH.exp().mean()
    assert one["mean_retention"] == pytest.approx(float(retention), rel=1e-5)


def test_a_transformer_has_no_state_to_carry(train_config):
    config = replace(train_config(training__carry_state=True), model={"model_type": "llama"})
    with pytest.raises(UserError, match="carry_state is True: a model of type llama has no state"):
        run_train(config)


def test_muon_is_refused_where_one_tensor_holds_several_matrices(train_config):
    heads = {"num_attention_heads": 2}
    for sizes in (
        {"model_type": "gated_delta_net", "num_hidden_layers": 1},
        {"model_type": "mamba2", "num_hidden_layers": 1},
        {"model_type": "gpt2", "n_layer": 1},
        {"model_type": "gpt_neox", "hidden_size": 16, "num_hidden_layers": 1} | heads,
    ):
        config = replace(train_config(optimizer__name="muon"), model=sizes)
        with pytest.raises(UserError, match="holds several matrices in one tensor"):
            run_train(config)
    run_train(replace(train_config(optimizer__name="muon", training__steps=1), model=LLAMA))


def test_model_whose_held_out_loss_would_be_wrong_is_refused(train_config):
    sizes = LLAMA | {"model_type": "granite", "logits_scaling": 8.0}
    with pytest.raises(UserError, match="granite change their logits after the head"):
        run_train(replace(train_config(), model=sizes))


def test_held_out_loss_follows_the_resets_of_training(train_config, token_data):
    settings = {"training__steps": 2, "training__eval_windows": 0}
    figures = run_train(train_config(data__reset_at_documents=True, **settings))
    model = load_model(figures["checkpoint"])
    split = TokenSplit.open(token_data, "heldout")
    nats, tokens = heldout_nats(model, split, 16, 4, 0, reset_at_documents=True)
    assert figures["heldout_nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)
    through, _ = heldout_nats(model, split, 16, 4, 0)
    assert through != pytest.approx(nats, rel=1e-6)
