"""Held-out scores against brute force, one token at a time."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from groundlm.data.windows import TokenSplit
from groundlm.evaluation.perplexity import bits_per_byte, score_split, token_nats, unigram_nats


def brute_force(model, split: TokenSplit, window: int) -> list[float]:
    """Nats of every token, each from its own forward pass over its window's prefix."""
    stream = [split.eos_token_id, *split.read(0, split.tokens).tolist()]
    nats = []
    for at in range(1, len(stream)):
        first = (at - 1) // window * window
        logits = model(torch.tensor([stream[first:at]])).logits[0, -1].detach().double()
        nats.append(-float(logits.log_softmax(-1)[stream[at]]))
    return nats


class ShortSplit:
    """The first `tokens` tokens of a split."""

    def __init__(self, split: TokenSplit, tokens: int) -> None:
        self._split, self.tokens, self.eos_token_id = split, tokens, split.eos_token_id

    def read(self, start: int, length: int) -> np.ndarray:
        assert start + length <= self.tokens
        return self._split.read(start, length)


@pytest.fixture
def models(tiny):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                    num_attention_heads=2, tie_word_embeddings=False)
    ).eval()  # fmt: skip
    return [tiny(vocab_size=300, decoder_bias=True, dtype=torch.float32), llama]


@pytest.mark.parametrize("tokens", [1, 6, 7, 8, 14, 15])
def test_every_token_is_scored_once_whatever_the_batch(models, token_data, tokens):
    split = ShortSplit(TokenSplit.open(token_data, "heldout"), tokens)
    for model in models:
        expected = brute_force(model, split, 7)
        for batch_size in (1, 2, 8):
            nats = score_split(model, split, 7, batch_size)
            assert nats.shape == (tokens,)
            np.testing.assert_allclose(nats, expected, atol=1e-5)


def test_first_windows_only_and_mode_restored(models, token_data):
    split = TokenSplit.open(token_data, "heldout")
    model = models[0].train()
    some = score_split(model, split, 7, 2, max_windows=3)
    assert model.training
    np.testing.assert_allclose(some, score_split(model, split, 7, 4)[: 3 * 7], atol=1e-6)


def test_slices_of_logits_do_not_matter(models, monkeypatch):
    ids = torch.randint(0, 300, (3, 11))
    whole = token_nats(models[0], ids[:, :-1], ids[:, 1:])
    monkeypatch.setattr("groundlm.evaluation.perplexity.SLICE_LOGITS", 7 * 300)
    torch.testing.assert_close(token_nats(models[0], ids[:, :-1], ids[:, 1:]), whole)


def test_bits_per_byte_leaves_the_end_token_out_of_both_sums():
    nats, tokens = np.array([1.0, 2.0, 5.0]), np.array([3, 4, 0])
    assert bits_per_byte(nats, tokens, 0, 6) == pytest.approx(3 / math.log(2) / 6)


def test_unigram_nats_are_add_one_frequencies(token_data):
    train = TokenSplit.open(token_data, "train")
    nats = unigram_nats(train, np.array([5, 7]))
    stream = train.read(0, train.tokens).tolist()
    expected = [-math.log((stream.count(i) + 1) / (len(stream) + 300)) for i in (5, 7)]
    np.testing.assert_allclose(nats, expected)
