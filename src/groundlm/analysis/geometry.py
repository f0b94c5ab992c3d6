"""The shape of a set of states: norms, spread, correlations, dimensions.

N states, D dimensions. Sums are float64. All figures are finite: a set that does not vary has
rank 0, and what is not defined (a correlation of one dimension) is None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CHUNK = 2048
DEAD = 1e-3
"""A dimension is dead if its sd is below this share of the median sd."""
SHARES = (0.5, 0.9, 0.99)
NOISE = 1e-6
"""A spread below this share of a dimension's largest value is rounding, and counts as none."""


def norms(states_ND: np.ndarray) -> dict[str, float]:
    """Mean and sd of the states' norms."""
    norm_N = np.concatenate(
        [
            np.linalg.norm(states_ND[first : first + CHUNK].astype(np.float64), axis=1)
            for first in range(0, len(states_ND), CHUNK)
        ]
    )
    return {"mean": float(norm_N.mean()), "sd": float(norm_N.std())}


def covariance(states_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and covariance [D, D] (divided by N), float64, a few rows at a time.

    Spread that is no more than rounding of the values is set to zero.
    """
    mean_D = states_ND.mean(0, dtype=np.float64)
    total_DD = np.zeros((states_ND.shape[1],) * 2)
    for first in range(0, len(states_ND), CHUNK):
        centred_ND = states_ND[first : first + CHUNK] - mean_D
        total_DD += centred_ND.T @ centred_ND
    covariance_DD = total_DD / len(states_ND)
    largest_D = np.maximum(states_ND.max(0), -states_ND.min(0))
    still_D = np.sqrt(np.diag(covariance_DD)) <= NOISE * largest_D
    covariance_DD[still_D] = 0.0
    covariance_DD[:, still_D] = 0.0
    return mean_D, covariance_DD


def spread(covariance_DD: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Smallest, median and largest sd of the dimensions, how many are dead; the sorted sds [D]."""
    sd_D = np.sort(np.sqrt(np.diag(covariance_DD)))
    median = float(np.median(sd_D))
    dead = int((sd_D < DEAD * median).sum()) if median > 0 else int((sd_D == 0).sum())
    figures = {"min": float(sd_D[0]), "median": median, "max": float(sd_D[-1]), "dead": dead}
    return figures, sd_D


def correlations(covariance_DD: np.ndarray, bins: int = 50) -> tuple[dict[str, Any], np.ndarray]:
    """Mean and largest absolute correlation of two dimensions, and a histogram over [0, 1].

    Dimensions that do not vary have none; with fewer than two others the figures are None. The
    histogram [bins] is the share of pairs.
    """
    variance_D = np.diag(covariance_DD)
    moving = np.flatnonzero(variance_D > 0)
    pairs = len(moving) * (len(moving) - 1) // 2
    if not pairs:
        return {"mean_absolute": None, "max_absolute": None, "pairs": 0}, np.zeros(bins)
    sd = np.sqrt(variance_D[moving])
    matrix = covariance_DD[np.ix_(moving, moving)]  # the one copy
    matrix /= sd
    matrix /= sd[:, None]
    values = np.concatenate([row[i + 1 :] for i, row in enumerate(matrix)])
    values = np.minimum(np.abs(values, out=values), 1.0, out=values)
    histogram = np.histogram(values, bins, (0, 1))[0] / pairs
    figures = {"mean_absolute": values.mean(), "max_absolute": values.max(), "pairs": pairs}
    return {k: v if isinstance(v, int) else float(v) for k, v in figures.items()}, histogram


def eigenvalues(covariance_DD: np.ndarray) -> np.ndarray:
    """Eigenvalues of a covariance, largest first, float64 [D]; rounding below zero is zero."""
    return np.clip(np.linalg.eigvalsh(covariance_DD)[::-1], 0.0, None)


def components(eigenvalues_D: np.ndarray) -> tuple[dict[str, int], np.ndarray]:
    """Principal components that hold 50, 90 and 99 % of the variance, and its cumulated share [D].

    A set that does not vary has 0 components.
    """
    total = eigenvalues_D.sum()
    if total == 0:
        return {f"for_{round(100 * s)}_percent": 0 for s in SHARES}, np.zeros_like(eigenvalues_D)
    share_D = np.minimum(np.cumsum(eigenvalues_D) / total, 1.0)
    return {
        f"for_{round(100 * s)}_percent": int(np.searchsorted(share_D, s - 1e-12)) + 1
        for s in SHARES
    }, share_D


def effective_ranks(eigenvalues_D: np.ndarray) -> dict[str, float]:
    """`stable_rank` sum(l) / max(l) and `participation_ratio` sum(l)^2 / sum(l^2); 0 if all are."""
    total = float(eigenvalues_D.sum())
    if total == 0:
        return {"stable_rank": 0.0, "participation_ratio": 0.0}
    return {
        "stable_rank": total / float(eigenvalues_D.max()),
        "participation_ratio": total**2 / float((eigenvalues_D**2).sum()),
    }
