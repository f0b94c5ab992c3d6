"""Sums over scored tokens: bits per byte, loss by context, bootstrap over documents."""

import numpy as np
import pytest

from groundlm import UserError
from groundlm.evaluation.reading import Scored
from groundlm.evaluation.tally import (
    Tally,
    bootstrap,
    context_bands,
    every_position,
    perplexity_of,
)


class Stream:
    tokens = 100
    document_ends = np.array([2, 5, 100])


def scored(positions, tokens, context, nats):
    return Scored(*(np.array(x) for x in (positions, tokens, context, nats)))


def test_sums_by_text_document_and_context():
    unigram = np.arange(10.0)
    tally = Tally(Stream(), eos_token_id=9, unigram_nats=unigram)
    tally.add(scored([0, 1, 2], [3, 9, 4], [1, 2, 3], [1.0, 2.0, 4.0]))
    tally.add(scored([99, 4], [5, 9], [9, 10], [8.0, 16.0]))
    assert (tally.nats, tally.tokens, tally.nats_per_token) == (31, 5, 6.2)
    assert (tally.text_nats, tally.unigram_text_nats) == (1 + 4 + 8, 3 + 4 + 5)
    assert tally.document_nats.tolist() == [3, 4 + 16, 8]
    assert tally.document_tokens.tolist() == [2, 2, 1]
    assert tally.by_context() == [
        {"from": 1, "to": 1, "tokens": 1, "nats": 1.0},
        {"from": 2, "to": 2, "tokens": 1, "nats": 2.0},
        {"from": 3, "to": 3, "tokens": 1, "nats": 4.0},
        {"from": 9, "to": 10, "tokens": 2, "nats": 12.0},
    ]


def test_position_by_position():
    tally = Tally(Stream(), None, bands=every_position(3))
    tally.add(scored(range(7), [1] * 7, [1, 2, 3, 1, 2, 3, 1], [1.0, 2, 3, 10, 20, 30, 7]))
    assert [band["nats"] for band in tally.by_context()] == [6.0, 11.0, 16.5]
    assert [(band["from"], band["to"]) for band in tally.by_context()] == [(1, 1), (2, 2), (3, 3)]


def test_without_an_end_token_all_is_text():
    tally = Tally(Stream(), eos_token_id=None)
    tally.add(scored([0, 1], [9, 9], [1, 1], [1.0, 2.0]))
    assert tally.text_nats == 3


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="2 scores of the model are not finite"):
        Tally(Stream(), None).add(scored([0, 1, 2], [1, 1, 1], [1, 2, 3], [np.nan, 1.0, np.inf]))


@pytest.mark.parametrize("longest", [1, 7, 8, 9, 1000, 2048])
def test_bands_hold_every_context_once(longest):
    bands = context_bands(longest)
    assert bands[0] == 1
    assert (np.diff(bands) > 0).all()
    assert bands[-1] > longest
    assert np.diff(bands).max() <= max(1, bands[-2] / 4)
    assert {2**k + 1 for k in range(12) if 2**k + 1 <= bands[-1]} <= set(bands)


def test_interval_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        counts = random.integers(10, 50, size=40)
        sums = counts * random.normal(5.0, 1.0, size=40)
        low, high = bootstrap(sums, counts, seed=trial, resamples=300)
        covered += low < 5.0 < high
    assert 0.88 <= covered / 200 <= 0.99


def test_interval_is_a_function_of_the_seed_and_weighs_by_tokens():
    sums, counts = np.array([10.0, 900.0]), np.array([10, 100])
    first = bootstrap(sums, counts, seed=1)
    assert first == bootstrap(sums, counts, seed=1)
    # Two documents: the extremes are each alone, the middle is the mean over tokens.
    assert first == pytest.approx((1.0, 9.0))
    assert bootstrap(sums[:1], counts[:1]) is None


def test_perplexity_beyond_a_float_is_none():
    assert perplexity_of(0.0) == 1
    assert perplexity_of(1000.0) is None
