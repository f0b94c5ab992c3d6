"""Sets of states whose geometry is known."""

import json

import numpy as np
import pytest

from groundlm.analysis import default_token, geometry


def spectrum(states):
    return geometry.eigenvalues(geometry.covariance(states)[1])


def test_rank_three_set_has_three_components_and_rank_three():
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.normal(size=(20, 3)))[0]
    values = random.normal(size=(5000, 3))
    coordinates = np.linalg.qr(values - values.mean(0))[0]  # centred, orthonormal
    states = coordinates @ basis.T + random.normal(size=20)
    figures, share = geometry.components(spectrum(states))
    assert figures == {"for_50_percent": 2, "for_90_percent": 3, "for_99_percent": 3}
    np.testing.assert_allclose(share[:3], [1 / 3, 2 / 3, 1], atol=1e-9)
    ranks = geometry.effective_ranks(spectrum(states))
    np.testing.assert_allclose(list(ranks.values()), [3, 3], atol=1e-9)


def test_effective_ranks_of_known_eigenvalues():
    ranks = geometry.effective_ranks(np.array([4.0, 2.0, 2.0, 0.0]))
    assert ranks == {"stable_rank": 2.0, "participation_ratio": 64 / 24}


def test_norms_and_spread_and_a_dead_dimension():
    states = np.array([[3.0, 4.0, 0.0], [-3.0, 4.0, 0.0], [0.0, 1.0, 1e-5], [0.0, 1.0, -1e-5]])
    np.testing.assert_allclose(geometry.norms(states)["mean"], 3, atol=1e-9)
    np.testing.assert_allclose(geometry.norms(states)["sd"], 2, atol=1e-9)
    figures, sd = geometry.spread(geometry.covariance(states)[1])
    np.testing.assert_allclose(sd, [np.sqrt(0.5e-10), 1.5, np.sqrt(4.5)], atol=1e-9)
    assert figures["dead"] == 1


def test_planted_correlation_is_found():
    random = np.random.default_rng(1)
    values = random.normal(size=(4000, 3))
    a, b, c = np.linalg.qr(values - values.mean(0))[0].T
    states = np.stack([a, -0.6 * a + 0.8 * b, c], 1)
    figures, histogram = geometry.correlations(geometry.covariance(states)[1])
    np.testing.assert_allclose(figures["max_absolute"], 0.6, atol=1e-9)
    np.testing.assert_allclose(figures["mean_absolute"], 0.2, atol=1e-9)
    assert figures["pairs"] == 3
    assert histogram[30] + histogram[29] == pytest.approx(1 / 3)
    assert histogram.sum() == pytest.approx(1)


@pytest.mark.parametrize(("rows", "moving"), [(1, 0), (50, 0), (3, 7)])
def test_degenerate_sets_have_finite_figures(rows, moving):
    """One state, equal states, fewer states than dimensions."""
    states = np.full((rows, 7), 3.3, np.float32)
    states += np.random.default_rng(0).normal(size=states.shape).astype(np.float32) * bool(moving)
    mean, covariance = geometry.covariance(states)
    eigenvalues = geometry.eigenvalues(covariance)
    ranks = geometry.effective_ranks(eigenvalues)
    figures = [
        geometry.norms(states),
        geometry.spread(covariance)[0],
        geometry.correlations(covariance)[0],
        geometry.components(eigenvalues)[0],
        ranks,
        default_token.mean_state(mean, covariance, 1.0),
        default_token.stability(states),
    ]
    json.dumps(figures, allow_nan=False)
    if moving:
        assert geometry.components(eigenvalues)[0]["for_99_percent"] <= rows - 1
    else:
        assert ranks == {"stable_rank": 0.0, "participation_ratio": 0.0}
        assert geometry.correlations(covariance)[0]["max_absolute"] is None


def test_covariance_is_numpys():
    states = np.random.default_rng(2).normal(3, 2, (5000, 9))
    mean, covariance = geometry.covariance(states)
    np.testing.assert_allclose(covariance, np.cov(states.T, bias=True), atol=1e-9)
    np.testing.assert_allclose(mean, states.mean(0), atol=1e-12)


def test_planted_mean_is_found():
    random = np.random.default_rng(3)
    mean = np.zeros(12)
    mean[2] = 10
    states = mean + random.normal(size=(8000, 12))
    found, covariance = geometry.covariance(states)
    figures = default_token.mean_state(found, covariance, geometry.norms(states)["mean"])
    assert figures["norm"] == pytest.approx(10, abs=0.05)
    assert figures["cosine_with_top_direction"] == pytest.approx(1, abs=1e-3)
    assert figures["share_of_second_moment"] == pytest.approx(100 / 112, abs=5e-3)
    assert default_token.stability(states)["min"] > 0.999
    moved = np.concatenate([states[:4000], -states[4000:]])
    assert default_token.stability(moved)["min"] < -0.99


def test_how_soon_sets_a_window_against_the_others():
    """Running means at 45, 18.4 and 0 degrees from the mean (1, 1) of the other, equal window."""
    window = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    figures, curve = default_token.how_soon(np.stack([window, window]))
    expected = [1 / np.sqrt(2), 3 / np.sqrt(10), 1]
    np.testing.assert_allclose(curve, expected, atol=1e-12)
    assert figures == {"after_1": curve[0], "after_10": None, "after_100": None,
                       "first_token_of_0.98": 3}  # fmt: skip
    apart = np.stack([window, -window, window])  # the others' mean: 0, a third of (2, 2), 0
    _, curve = default_token.how_soon(apart)
    np.testing.assert_allclose(curve, -np.array(expected) / 3, atol=1e-12)
    with pytest.raises(ValueError, match="no others"):
        default_token.how_soon(window[None])


def test_one_large_still_dimension_does_not_hide_the_others():
    states = np.random.default_rng(5).normal(0, 0.05, (500, 8)).astype(np.float32)
    states[:, 3] = 1e5
    _, covariance = geometry.covariance(states)
    moving = np.delete(np.diag(covariance), 3)
    assert covariance[3, 3] == 0
    np.testing.assert_allclose(moving, 0.0025, rtol=0.3)


def test_rank_correlation_and_top_tokens():
    counts = np.array([5, 1, 9, 3])
    assert default_token.rank_correlation(np.log(counts), counts) == pytest.approx(1)
    assert default_token.rank_correlation(np.append(-np.log(counts), 7.0), counts) == pytest.approx(
        -1
    )
    assert default_token.rank_correlation(np.zeros(4), counts) is None
    ids, probabilities = default_token.top_tokens(np.log(counts), 2)
    assert ids == [2, 0]
    np.testing.assert_allclose(probabilities, [0.5, 5 / 18])
