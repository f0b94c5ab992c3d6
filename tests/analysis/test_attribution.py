"""Parts of a read sum to the read, and their effects to its effect on the logits."""

import numpy as np
import pytest
import torch

from groundlm.analysis.attribution import attribute_reads
from groundlm.analysis.taps import listening, replacing
from groundlm.errors import UserError

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


def test_effect_of_one_head_is_that_of_its_silence(tiny):
    """Silenced at one position, a head's part is gone from W_o's input there and nowhere else."""
    model = tiny()
    found = attribute_reads(model, IDS, [29], [7])
    reads, gated = [], []
    with torch.no_grad():
        with listening(model, "predict.0.gated", lambda _, x: gated.append(x[0].view(3, 7))):
            model(torch.from_numpy(IDS)[None])
        with (
            replacing(model, "predict.0.gated", lambda x: x),
            listening(model, "predicted", lambda _, x: reads.append(x[0])),
        ):
            model(torch.from_numpy(IDS)[None])
    base = model.model.requires_grad_(False)
    scale = (reads[29].square().mean() + base.norm_eps).rsqrt()
    through = base.predict[0].read.out.weight.view(20, 3, 7)
    for head in range(3):
        moved = through[:, head] @ gated[29][head]
        hidden = base.decode.proj.weight @ (moved * scale * base.decode.norm.weight)
        expected = float(base.embedding.weight[7] @ hidden)
        assert found.effect_PTH[0, :, head].sum() == pytest.approx(expected, abs=1e-9)


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
