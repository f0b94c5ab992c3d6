"""How far back a GPN reaches: likeness of its states over lags, retention of its memory.

N windows, T tokens, D state, H heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1500)
FAST_TOKENS = 4.0
"""A head is fast if its horizon is shorter."""
NOISE = 1e-6
FORGOTTEN = -1e4
"""A log-decay after which nothing is left in any float."""


def cosine_by_lag(states_NTD: np.ndarray, centred: bool) -> dict[str, list]:
    """Mean cosine of s_t and s_{t+k} for the lags k that the windows are long enough for.

    `centred` takes each window's mean from its states first. A state of norm 0 has cosine 0.
    Returns `lags` and `cosine`.
    """
    lags = [k for k in LAGS if k < states_NTD.shape[1]]
    sums = np.zeros(len(lags))
    for states_TD in states_NTD:
        rows_TD = states_TD.astype(np.float64)
        size = np.linalg.norm(rows_TD, axis=1).max()
        if centred:
            rows_TD = rows_TD - rows_TD.mean(0)
        norm_T1 = np.linalg.norm(rows_TD, axis=1, keepdims=True)
        real_T1 = norm_T1 > NOISE * size
        unit_TD = np.where(real_T1, rows_TD, 0.0) / np.where(real_T1, norm_T1, 1.0)
        sums += [np.einsum("td,td->t", unit_TD[:-k], unit_TD[k:]).mean() for k in lags]
    return {"lags": lags, "cosine": [float(x) for x in sums / len(states_NTD)]}


def bounded(log_decay: np.ndarray) -> np.ndarray:
    """Log-decays that forget everything at once, down to -inf, as finite ones that do, too."""
    return np.maximum(log_decay, FORGOTTEN)


def retention(log_decay_NTH: np.ndarray) -> dict[str, list]:
    """Share of what stands in the memory that is left k tokens later, by head.

    prod_{tau <= k} exp(gamma), averaged over windows and start positions. Returns `lags` (all up to
    64, then about 8 an octave, at most T - 1, but at least 1) and `retention` [H][lags].
    """
    windows, tokens, heads = log_decay_NTH.shape
    sums_NTH = np.zeros((windows, tokens + 1, heads))
    np.cumsum(bounded(log_decay_NTH), axis=1, dtype=np.float64, out=sums_NTH[:, 1:])
    fine = np.arange(1, 65)
    coarse = np.unique(np.round(64 * 2 ** np.arange(0, 10, 1 / 8)).astype(int))
    lags = [int(k) for k in np.union1d(fine, coarse) if k <= max(tokens - 1, 1)]
    curve = [np.exp(sums_NTH[:, k:] - sums_NTH[:, :-k]).mean((0, 1)) for k in lags]
    return {"lags": lags, "retention": np.stack(curve, 1).tolist()}


def memory_horizons(curves: dict[str, list]) -> dict[str, Any]:
    """Horizon of each head, and how many heads are fast and slow.

    The horizon is the lag, in tokens, where retention falls to 1/e, found on the line between the
    logarithms of two neighbouring lags; None if it does not fall so far within the windows, which
    counts as slow.
    """
    horizons = [_crossing(curves["lags"], row) for row in curves["retention"]]
    fast = [h for h in horizons if h is not None and h < FAST_TOKENS]
    slow = [h for h in horizons if h is not None and h >= FAST_TOKENS]
    return {
        "horizon_tokens": horizons,
        "heads": len(horizons),
        "fast": len(fast),
        "slow": len(horizons) - len(fast),
        "beyond_the_windows": horizons.count(None),
        "fast_range_tokens": [min(fast), max(fast)] if fast else None,
        "slow_range_tokens": [min(slow), max(slow)] if slow else None,
    }


def pools(horizons: list[float | None]) -> tuple[list[int], list[int]]:
    """Numbers of the fast heads and of the slow ones."""
    fast = [i for i, h in enumerate(horizons) if h is not None and h < FAST_TOKENS]
    return fast, [i for i in range(len(horizons)) if i not in fast]


def _crossing(lags: list[int], row: list[float]) -> float | None:
    before_lag, before_log = 0.0, 0.0
    for lag, value in zip(lags, row, strict=True):
        log = float(np.log(max(value, 1e-300)))
        if log <= -1:
            return before_lag + (lag - before_lag) * (-1 - before_log) / (log - before_log)
        before_lag, before_log = float(lag), log
    return None
