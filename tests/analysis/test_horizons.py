"""Horizons of series whose memory is known."""

import numpy as np
import pytest

from groundlm.analysis import horizons


def test_known_half_lives_give_known_horizons():
    """A half-life of n tokens is a horizon of n / ln 2."""
    half_lives = np.array([1.0, 5.0, 40.0, 1e9])
    log_decay = np.broadcast_to(-np.log(2) / half_lives, (2, 300, 4)).astype(np.float32)
    curves = horizons.retention(log_decay)
    figures = horizons.memory_horizons(curves)
    found = figures["horizon_tokens"]
    np.testing.assert_allclose(found[:3], half_lives[:3] / np.log(2), rtol=1e-5)
    assert found[3] is None
    assert (figures["fast"], figures["slow"], figures["beyond_the_windows"]) == (1, 3, 1)
    assert horizons.pools(found) == ([0], [1, 2, 3])
    np.testing.assert_allclose(curves["retention"][1][4], 0.5, rtol=1e-5)


def test_retention_is_averaged_after_the_product():
    log_decay = np.log(np.array([0.5, 0.1, 0.8]))[None, :, None]
    curves = horizons.retention(log_decay)
    assert curves["lags"] == [1, 2]
    expected = [(0.5 + 0.1 + 0.8) / 3, (0.05 + 0.08) / 2]
    np.testing.assert_allclose(curves["retention"][0], expected, rtol=1e-9)


def test_a_decay_that_underflows_has_a_finite_horizon():
    figures = horizons.memory_horizons(horizons.retention(np.full((1, 9, 1), -1e4)))
    assert 0 < figures["horizon_tokens"][0] < 1


def test_cosine_of_an_ar1_process_falls_as_its_powers():
    random, phi, tokens, width = np.random.default_rng(0), 0.8, 3000, 64
    states = np.zeros((2, tokens, width))
    for t in range(1, tokens):
        noise = random.normal(size=(2, width))
        states[:, t] = phi * states[:, t - 1] + np.sqrt(1 - phi**2) * noise
    shift = 3.0 * np.ones(width)
    centred = horizons.cosine_by_lag(states + shift, centred=True)
    raw = horizons.cosine_by_lag(states + shift, centred=False)
    assert centred["lags"] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1500]
    powers = phi ** np.array(centred["lags"])
    np.testing.assert_allclose(centred["cosine"], powers, atol=0.02)
    np.testing.assert_allclose(raw["cosine"], (9 + powers) / 10, atol=0.02)


def test_lags_stop_at_the_window_and_constant_states_have_cosines():
    constant = np.full((1, 5, 3), 2.7, np.float32)
    assert horizons.cosine_by_lag(constant, centred=True) == {
        "lags": [1, 2, 4],
        "cosine": [0.0] * 3,
    }
    assert horizons.cosine_by_lag(constant, centred=False)["cosine"] == pytest.approx([1, 1, 1])
    assert horizons.cosine_by_lag(constant[:, :1], centred=False) == {"lags": [], "cosine": []}
    assert horizons.retention(np.full((1, 1, 2), -0.5))["lags"] == [1]
