"""Perplexity against brute force, one token at a time."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
)

from groundlm import UserError
from groundlm.baselines.gated_delta_net import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from groundlm.data.windows import TokenSplit
from groundlm.evaluation import score
from groundlm.evaluation.perplexity import (
    bits_per_byte,
    heldout_nats,
    score_split,
    token_nats,
    unigram_nats,
)
from groundlm.evaluation.reading import Reading, TokenList, walk
from groundlm.evaluation.scoring import check_scorable, is_recurrent
from groundlm.models import build_model

WINDOW = 7


def brute(model: PreTrainedModel, context: list[int], targets: list[int]) -> list[float]:
    """Nats of each target, from one pass over the context and all targets."""
    with torch.no_grad():
        ids = torch.tensor([context + targets])
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    scores = logits[len(context) - 1 : -1].log_softmax(-1)
    return [-float(row[target]) for row, target in zip(scores, targets, strict=True)]


def random_ids(length: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(1)).tolist()


class ShortSplit:
    """The first `tokens` tokens of a split."""

    def __init__(self, split: TokenSplit, tokens: int) -> None:
        self._split, self.tokens, self.eos_token_id = split, tokens, split.eos_token_id

    def read(self, start: int, length: int) -> np.ndarray:
        assert start + length <= self.tokens
        return self._split.read(start, length)


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1])
@pytest.mark.parametrize("prefix", [None, 0])
def test_every_token_is_scored_once(model, atol, length, prefix):
    """C34, against one window at a time."""
    ids = random_ids(length)
    stream = ids if prefix is None else [prefix, *ids]
    expected = sum(
        sum(brute(model, stream[at : at + 1], stream[at + 1 : at + 1 + WINDOW]))
        for at in range(0, len(stream) - 1, WINDOW)
    )
    for batch_size in (1, 8):
        nats, tokens = score(model, ids, window=WINDOW, prefix=prefix, batch_size=batch_size)
        assert tokens == len(stream) - 1
        assert nats == pytest.approx(expected, abs=atol)


def test_a_window_as_long_as_the_text_is_one_pass(model, atol):
    ids = random_ids(20)
    for window in (19, 20, 64):
        assert score(model, ids, window=window)[0] == pytest.approx(
            sum(brute(model, ids[:1], ids[1:])), abs=atol
        )


@pytest.mark.parametrize("stride", [1, 3, 6])
@pytest.mark.parametrize("length", [4, 8, 23])
def test_overlapping_windows_score_each_token_in_one_of_them(model, atol, stride, length):
    ids = random_ids(length)
    expected, done, at = [], 0, 0
    while done < length - 1:
        end = min(at + WINDOW, length - 1)
        nats = brute(model, ids[at : at + 1], ids[at + 1 : end + 1])
        expected += nats[done - at :]
        done, at = end, at + stride
    assert len(expected) == length - 1
    for batch_size in (1, 4):
        nats, tokens = score(model, ids, window=WINDOW, stride=stride, batch_size=batch_size)
        assert (nats, tokens) == (pytest.approx(sum(expected), abs=atol), length - 1)


def recurrent_models(tiny):
    torch.manual_seed(0)
    mamba = Mamba2Config(
        vocab_size=300, hidden_size=16, state_size=8, num_heads=4, head_dim=8, expand=2,
        n_groups=1, num_hidden_layers=2, chunk_size=4, initializer_range=0.3,
    )  # fmt: skip
    delta = GatedDeltaNetConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return [
        tiny(vocab_size=300),
        Mamba2ForCausalLM(mamba).eval(),
        GatedDeltaNetForCausalLM(delta).eval(),
    ]


def test_carried_state_reads_as_one_pass(tiny):
    ids = random_ids(37)
    for model in recurrent_models(tiny):
        assert is_recurrent(model)
        atol = 1e-9 if model.config.model_type == "gpn" else 1e-3
        expected = sum(brute(model, ids[:1], ids[1:]))
        reset = score(model, ids, window=8)[0]
        assert abs(reset - expected) > 10 * atol
        for window in (1, 8, 36):
            nats, tokens = score(model, ids, window=window, state="carry")
            assert (nats, tokens) == (pytest.approx(expected, abs=atol), 36), (
                model.config.model_type
            )


def test_whole_documents_are_read_by_themselves(tiny, token_data):
    split = TokenSplit.open(token_data, "heldout")
    model = tiny(vocab_size=300)
    bounds = [0, *split.document_ends.tolist()]
    expected = [
        brute(model, [split.eos_token_id], split.read(a, b - a).tolist())
        for a, b in itertools.pairwise(bounds)
    ]
    for window, batch_size in ((16, 1), (16, 5), (1000, 3)):
        nats = np.full(split.tokens, np.nan)
        reading = Reading(window, whole_documents=True)
        for scored in walk(model, split, reading.rows(split), split.eos_token_id, batch_size):
            assert np.isnan(nats[scored.positions]).all()
            nats[scored.positions] = scored.nats
            starts = np.array(bounds)[np.searchsorted(bounds, scored.positions, side="right") - 1]
            assert (scored.context_tokens == scored.positions - starts + 1).all()
        np.testing.assert_allclose(nats, np.concatenate(expected), atol=1e-9)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (Reading(0), "--window-tokens is 0"),
        (Reading(8, 0), "--stride-tokens is 0"),
        (Reading(8, 9), "--stride-tokens is 9"),
        (Reading(8, 4, "carry"), "--stride-tokens is 4"),
        (Reading(8, None, "carry"), "--state carry needs a recurrent model, this is a llama"),
        (Reading(8, whole_documents=True), "--whole-documents needs a recurrent model"),
        (Reading(8, None, "carry", True), "choose one"),
        (Reading(513), "--window-tokens is 513: the model reads at most 512"),
    ],
)
def test_readings_that_no_one_can_do(tiny_llama, reading, message):
    with pytest.raises(UserError, match=message):
        reading.check(tiny_llama)


@pytest.mark.parametrize("tokens", [1, 6, 7, 8, 14, 15])
def test_split_in_windows_whatever_the_batch(model, atol, token_data, tokens):
    split = ShortSplit(TokenSplit.open(token_data, "heldout"), tokens)
    stream = [split.eos_token_id, *split.read(0, tokens).tolist()]
    expected = [
        x
        for at in range(0, tokens, WINDOW)
        for x in brute(model, stream[at : at + 1], stream[at + 1 : at + 1 + WINDOW])
    ]
    for batch_size in (1, 2, 8):
        nats = score_split(model, split, WINDOW, batch_size)
        assert nats.shape == (tokens,)
        np.testing.assert_allclose(nats, expected, atol=atol)


def test_first_windows_only_parts_and_mode_restored(tiny, token_data):
    split = TokenSplit.open(token_data, "heldout")
    model = tiny(vocab_size=300).train()
    some = score_split(model, split, 7, 2, max_windows=3)
    assert model.training
    np.testing.assert_allclose(some, score_split(model, split, 7, 4)[: 3 * 7], atol=1e-9)
    whole = heldout_nats(model, split, 7, 4, 9)
    parts = [heldout_nats(model, split, 7, 2, 9, (i, 3)) for i in range(3)]
    assert whole[1] == 63 == sum(n for _, n in parts)
    assert whole[0] == pytest.approx(sum(x for x, _ in parts), abs=1e-8)


def test_slices_of_logits_do_not_matter(model, atol, monkeypatch):
    ids = torch.randint(0, 300, (3, 11))
    whole = token_nats(model, ids[:, :-1], ids[:, 1:])
    monkeypatch.setattr("groundlm.evaluation.scoring.SLICE_LOGITS", 7 * 300)
    sliced = token_nats(model, ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(sliced, whole, atol=atol, rtol=0)


def test_a_model_that_changes_its_logits_is_refused(tiny_llama, model):
    check_scorable(model)
    forward = tiny_llama.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 2 * torch.tanh(out.logits / 2)
        return out

    tiny_llama.forward = capped
    with pytest.raises(UserError, match="llama change their logits"):
        check_scorable(tiny_llama)


SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        {"model_type": "granite", "logits_scaling": 4.0},
        {"model_type": "gemma2", "num_key_value_heads": 1, "head_dim": 8},  # caps at 30
        {"model_type": "cohere", "logit_scale": 0.0625},
    ],
)
def test_logits_changed_after_the_head_are_refused_at_initial_weights(sizes):
    with pytest.raises(UserError, match="change their logits after the head"):
        check_scorable(build_model(SIZES | sizes, 0))


HEADS = {"num_attention_heads": 2}
USUAL = {
    "llama": HEADS,
    "qwen2": HEADS | {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 4},  # less than is checked
    "gpt_neox": HEADS,
    "mamba": {},
    "opt": HEADS | {"word_embed_proj_dim": 16},
    "rwkv": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", USUAL)
def test_models_that_people_use_can_be_scored(kind, dtype):
    sizes = {"model_type": kind, "vocab_size": 60}
    if kind != "gpt2":
        sizes |= {"hidden_size": 16, "num_hidden_layers": 1}
    check_scorable(build_model(sizes | USUAL[kind], 0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_sees_what_follows_is_refused(dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "initializer_range": 0.5}  # fmt: skip
    with pytest.raises(UserError, match="bert change their logits after the head"):
        check_scorable(BertLMHeadModel(BertConfig(**sizes, is_decoder=True)).to(dtype))
    with pytest.raises(UserError, match="bert read a token in the light of those after it"):
        check_scorable(BertLMHeadModel(BertConfig(**sizes)).to(dtype))


def test_checking_leaves_the_mode_as_it_was(model):
    model.train()
    check_scorable(model)
    assert model.training


def test_resets_at_documents_are_those_of_training(tiny, token_data):
    model = tiny(vocab_size=300)
    split = TokenSplit.open(token_data, "heldout")
    eos = split.eos_token_id
    apart = score_split(model, split, 16, 4, reset_at_documents=True)
    through = score_split(model, split, 16, 4)
    inputs = np.concatenate([[eos], split.read(0, split.tokens - 1)])
    with torch.inference_mode():
        for start in range(0, 64, 16):
            ids = torch.from_numpy(inputs[start : start + 16])[None]
            targets = torch.from_numpy(split.read(start, 16))
            logits = model(input_ids=ids, resets=ids == eos).logits[0]
            nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            np.testing.assert_allclose(apart[start : start + 16], nats, atol=1e-9)
    assert np.abs(apart - through).max() > 1e-3


def test_qwen3_next_cannot_carry_its_state():
    config = Qwen3NextConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_experts=0,
        layer_types=["linear_attention"], linear_num_key_heads=1, linear_num_value_heads=1,
        linear_key_head_dim=8, linear_value_head_dim=8, mlp_only_layers=[0],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="needs a recurrent model, this is a qwen3_next"):
        score(model, list(range(9)), window=4, state="carry")
    assert score(model, list(range(9)), window=4)[1] == 8


def test_nothing_to_score():
    assert score(None, [], window=4) == (0.0, 0)


def test_bits_per_byte_is_the_definition():
    assert bits_per_byte(3.0, 6) == pytest.approx(3 / math.log(2) / 6)


def test_unigram_nats_are_add_one_frequencies(token_data):
    train = TokenSplit.open(token_data, "train")
    nats = unigram_nats(train)
    stream = train.read(0, train.tokens).tolist()
    expected = [-math.log((stream.count(i) + 1) / (len(stream) + 300)) for i in (5, 7)]
    np.testing.assert_allclose(nats[[5, 7]], expected)


def test_a_list_of_ids_is_one_document():
    assert TokenList(np.arange(4)).document_ends.tolist() == [4]
    assert Reading(8).rows(TokenList(np.arange(0))).first.tolist() == []
