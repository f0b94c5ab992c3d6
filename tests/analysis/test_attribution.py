"""Parts of a read sum to the read, and their effects to its effect on the logits."""

import gc

import numpy as np
import pytest
import torch

from groundlm.analysis.attribution import attribute_reads
from groundlm.analysis.interventions import freeze_memory, reset_every, silence_heads
from groundlm.analysis.taps import listening, replacing
from groundlm.errors import UserError
from groundlm.model import cell

IDS = torch.randint(1, 61, (30,), generator=torch.Generator().manual_seed(1)).numpy()
POSITIONS = [0, 1, 17, 29]


@pytest.mark.parametrize("layers", [1, 2])
def test_parts_sum_to_the_read(tiny, layers):
    model = tiny(num_layers=layers)
    seen = []
    with (
        torch.no_grad(),
        listening(model, f"predict.{layers - 1}.answer", lambda _, x: seen.append(x[0])),
    ):
        model(torch.from_numpy(IDS)[None])
    found = attribute_reads(model, IDS, POSITIONS)
    answers = torch.stack(seen)[POSITIONS].numpy()
    assert np.abs(answers).max() > 0.1
    np.testing.assert_allclose(found.parts_PTHV.sum(1), answers, atol=1e-9)
    np.testing.assert_allclose(found.answer_PHV, answers, atol=0)
    has_read = (answers != 0).any(-1)  # a query whose components all are cut off reads nothing
    np.testing.assert_allclose(found.share_PTH.sum(1), has_read, atol=1e-9)
    assert has_read.sum() > 8
    for parts, position in zip(found.parts_PTHV, POSITIONS, strict=True):
        assert not parts[position + 1 :].any()


def test_effects_sum_to_what_the_read_does_to_the_logit(tiny):
    """With the decoder's scale held: logit of s^p minus logit of s^p without the read."""
    model = tiny(decoder_bias=True)
    states = {}
    with (
        torch.no_grad(),
        listening(model, "*", lambda at, x: states.setdefault(at, []).append(x[0])),
    ):
        model(torch.from_numpy(IDS)[None])
    targets = [4, 0, 60, 9]
    found = attribute_reads(model, IDS, POSITIONS, targets)
    base = model.model.requires_grad_(False)
    for p, position in enumerate(POSITIONS):
        full, read = states["predicted"][position], states["predict.0.read"][position]
        scale = (full.square().mean() + base.norm_eps).rsqrt()
        row = base.embedding.weight[targets[p]]
        expected = row @ (base.decode.proj.weight @ (read * scale * base.decode.norm.weight))
        assert found.effect_PTH[p].sum() == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("source", [0, 11, 29])
def test_effect_of_a_part_is_that_of_its_removal(tiny, source):
    """Cut out of one head's answer at one position of a real pass, with the norms' scales held."""
    model, head, position, target = tiny(decoder_bias=True), 1, 29, 7
    found = attribute_reads(model, IDS, [position], [target])
    part_V = torch.from_numpy(found.parts_PTHV[0, source, head])
    kept: dict[str, list[torch.Tensor]] = {}
    steps = iter(range(len(IDS)))

    def cut(gated_BY):
        if next(steps) != position:
            return gated_BY
        answer = kept["predict.0.answer"][position].flatten()
        left = answer.clone()
        left.view(3, 7)[head] -= part_V
        # Gate, weight and scale stay as they were.
        return gated_BY * torch.where(answer == 0, 1, left / answer)

    ids_1T = torch.from_numpy(IDS)[None]
    with torch.no_grad():
        with listening(model, "*", lambda at, x: kept.setdefault(at, []).append(x[0])):
            model(ids_1T)
        changed = []
        with (
            replacing(model, "predict.0.gated", cut),
            listening(model, "predicted", lambda _, x: changed.append(x[0])),
        ):
            model(ids_1T)
        before = kept["predicted"][position]
        moved = before - changed[position]
        assert moved.abs().max() > 1e-6 or source == 29
        ratio = 1e-6  # so small a step that the decoder's scale stays as it was
        row = model.model.embedding.weight[target]
        base = model.model
        logit = row @ base.decoder_hidden(before[None])[0]
        nudged = row @ base.decoder_hidden((before - ratio * moved)[None])[0]
        # What the scale itself does to the logit is not part of the effect.
        along = (before @ moved) / (before.square().sum() + 20 * base.norm_eps)
        bias_free = logit - (row @ base.decode.bias if base.decode.bias.shape == row.shape else 0)
        expected = (logit - nudged) / ratio + along * bias_free
    assert found.effect_PTH[0, source, head] == pytest.approx(float(expected), abs=1e-6)


def test_default_target_is_the_most_likely_token(tiny):
    model = tiny()
    with torch.no_grad():
        best = model(torch.from_numpy(IDS)[None]).logits[0, 17].argmax()
    assert attribute_reads(model, IDS, [17]).target_ids == [int(best)]


def test_refusals(tiny):
    with pytest.raises(UserError, match="this one has none"):
        attribute_reads(tiny(num_heads=0), IDS, [0])
    with pytest.raises(UserError, match="position 30 is outside the text of 30 tokens"):
        attribute_reads(tiny(), IDS, [30])
    with pytest.raises(UserError, match="1 targets for 2 positions"):
        attribute_reads(tiny(), IDS, [3, 4], [5])
    model = tiny()
    for enter in (freeze_memory(model, 5), silence_heads(model, [0]), reset_every(model, 4)):
        with enter, pytest.raises(UserError, match="leave the intervention first"):
            attribute_reads(model, IDS, [3])


def test_only_one_memory_is_kept(tiny, monkeypatch):
    """Peak of tensors alive, counted in memories, is far below the number of tokens."""
    model, most = tiny(), 0
    real = cell.recall

    def counting(memory, key):
        nonlocal most
        count = sum(
            isinstance(x, torch.Tensor) and x.shape == memory.shape for x in gc.get_objects()
        )
        most = max(most, count)
        return real(memory, key)

    monkeypatch.setattr(cell, "recall", counting)
    attribute_reads(model, np.resize(IDS, 200), [199])
    assert 0 < most < 60
