"""Every row of the analyses table for one model, as plain numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from groundlm.analysis import default_token, geometry, horizons
from groundlm.analysis.collect import Collected
from groundlm.analysis.figures import FIGURES, OTHER_STATE, STATE, STATES
from groundlm.errors import UserError
from groundlm.model.modeling import GPNForCausalLM

DIGITS = 6
CURVE_POINTS = 256


def state_statistics(
    model: PreTrainedModel,
    seen: Collected,
    vocabulary: int,
    train_counts: np.ndarray | None = None,
    other: Collected | None = None,
) -> dict[str, Any]:
    """All figures of a model from one pass over a text.

    Args:
        vocabulary: ids that the tokenizer has; rows of a padded vocabulary beyond are left out.
        train_counts: tokens of the training split by id, int [W].
        other: the same text read by a second model, for the row on the decoder's bias.

    Returns:
        `state` (what the figures are about), `figures` (name -> title, values, definition, paper),
        `left_out` (name -> reason), `curves` (what the plots show). Numbers have six digits; none
        is NaN or infinite.

    Raises:
        UserError: states too large for a figure to be a number.
    """
    values, curves = _geometry(seen.states_NTD)
    left_out: dict[str, str] = {}
    mean_D = seen.states_NTD.mean((0, 1), dtype=np.float64)
    logits_W = default_token.decoded(model, mean_D)[:vocabulary]
    values["mean_decoded"], curves["decoded"] = _decoded(logits_W, train_counts)
    state = STATE if isinstance(model, GPNForCausalLM) else OTHER_STATE
    if isinstance(model, GPNForCausalLM):
        values["mean_embedding"] = _mean_embedding(model, mean_D, logits_W)
    else:
        left_out["mean_embedding"] = "only a GPN brings an embedding to its state in one step"
    if len(seen.states_NTD) > 1:
        values["how_soon"], curve_T = default_token.how_soon(seen.states_NTD)
        curves["how_soon"] = _thinned(curve_T, "tokens", "cosine", logarithmic=True)
    else:
        left_out["how_soon"] = "a window is set against the mean of others, and there is one alone"
    if other is None:
        left_out["decoder_bias"] = "needs a second model: give it with --against"
    else:
        values["decoder_bias"] = _norm_change(mean_D, other)
    raw = horizons.cosine_by_lag(seen.states_NTD, centred=False)
    centred = horizons.cosine_by_lag(seen.states_NTD, centred=True)
    curves["cosine"] = {"lags": raw["lags"], "raw": raw["cosine"], "centred": centred["cosine"]}
    if raw["lags"]:
        values["state_horizon"] = _at_lags(raw, "raw") | _at_lags(centred, "centred")
    else:
        left_out["state_horizon"] = "a window of one token has no lag"
    if beyond := [str(k) for k in horizons.LAGS if k >= seen.states_NTD.shape[1]]:
        left_out["lags"] = f"the windows are too short for {', '.join(beyond)}"
    _memory(seen, values, curves, left_out)
    for name, found, why in (
        ("gates", seen.openness_NT, "only a GPN has gates on its state"),
        ("budget", seen.norms_NT, "only a GPN's state is such a sum"),
    ):
        if found:
            values[name] = {place: float(x.mean(dtype=np.float64)) for place, x in found.items()}
        else:
            left_out[name] = why
    figures = {
        name: {"title": figure.title, "values": values[name]}
        | ({"paper": figure.paper} if figure.paper else {})
        | {"definition": figure.definition.replace(STATE, state)}
        for name, figure in FIGURES.items()
        if name in values
    }
    results: dict[str, Any] = {"state": STATES[state], "figures": figures}
    return rounded(results | {"left_out": left_out, "curves": curves})


def rounded(value: Any, name: str = "") -> Any:
    """The same with floats of six digits, so that results can be compared byte by byte.

    Raises `UserError` naming a number that is not finite by its keys.
    """
    if isinstance(value, dict):
        return {key: rounded(x, f"{name} {key}") for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(x, name) for x in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(
                f"{name.strip() or 'a figure'} is {value}: the model's values are too large"
            )
        return float(f"{value:.{DIGITS}g}")
    return value


def _geometry(states_NTD: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    states_ND = states_NTD.reshape(-1, states_NTD.shape[-1])
    mean_D, covariance_DD = geometry.covariance(states_ND)
    norm = geometry.norms(states_ND)
    spread, sd_D = geometry.spread(covariance_DD)
    pairs, histogram = geometry.correlations(covariance_DD)
    eigenvalues_D = geometry.eigenvalues(covariance_DD)
    components, share_D = geometry.components(eigenvalues_D)
    values = {
        "state_norm": norm,
        "dimension_sd": spread | {"dimensions": len(sd_D)},
        "correlations": pairs,
        "components": components | {"dimensions": len(sd_D), "states": len(states_ND)},
        "effective_ranks": geometry.effective_ranks(eigenvalues_D),
        "mean_state": default_token.mean_state(mean_D, covariance_DD, norm["mean"]),
        "mean_stability": default_token.stability(states_ND),
    }
    curves = {
        "sd": _thinned(sd_D, "rank", "sd"),
        "correlations": {"bins": len(histogram), "share_of_pairs": histogram.tolist()},
        "variance": _thinned(share_D, "components", "share"),
    }
    return values, curves


def _decoded(
    logits_W: np.ndarray, train_counts: np.ndarray | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    ids, probabilities = default_token.top_tokens(logits_W)
    spearman = None
    if train_counts is not None:
        spearman = default_token.rank_correlation(logits_W, train_counts)
    return {"top_ids": ids, "spearman": spearman}, {"ids": ids, "probability": probabilities}


def _mean_embedding(
    model: GPNForCausalLM, mean_D: np.ndarray, mean_logits_W: np.ndarray
) -> dict[str, Any]:
    token_D = default_token.fused_mean_embedding(model, len(mean_logits_W))
    logits_W = default_token.decoded(model, token_D)[: len(mean_logits_W)]
    ids, _ = default_token.top_tokens(logits_W)
    default_ids, _ = default_token.top_tokens(mean_logits_W)
    return {
        "shared_of_top": len(set(ids) & set(default_ids)),
        "cosine": default_token.cosine(token_D, mean_D),
        "top_ids": ids,
    }


def _norm_change(mean_D: np.ndarray, other: Collected) -> dict[str, Any]:
    norm = float(np.linalg.norm(mean_D))
    theirs = float(np.linalg.norm(other.states_NTD.mean((0, 1), dtype=np.float64)))
    return {"norm": norm, "norm_against": theirs, "change": theirs / norm - 1 if norm else None}


def _at_lags(curve: dict[str, list], name: str) -> dict[str, float]:
    by_lag = dict(zip(curve["lags"], curve["cosine"], strict=True))
    last = curve["lags"][-1]
    return {f"{name}_at_{lag}": by_lag[lag] for lag in sorted({1, 256, last} & by_lag.keys())}


def _memory(
    seen: Collected, values: dict[str, Any], curves: dict[str, Any], left_out: dict[str, str]
) -> None:
    if seen.log_decay_NTH is None or seen.beta_NTH is None:
        reason = "the model has no memory"
        left_out |= {"memory_horizon": reason, "write_strength": reason}
        return
    curves["retention"] = horizons.retention(seen.log_decay_NTH)
    values["memory_horizon"] = horizons.memory_horizons(curves["retention"])
    beta_H = seen.beta_NTH.mean((0, 1), dtype=np.float64)
    values["write_strength"] = {f"head_{h}": float(x) for h, x in enumerate(beta_H)}


def _thinned(curve: np.ndarray, x: str, y: str, logarithmic: bool = False) -> dict[str, list]:
    """A curve over 1, 2, ... at no more than 256 places, ends included."""
    count = len(curve)
    if count <= CURVE_POINTS:
        places = np.arange(1, count + 1)
    elif logarithmic:
        places = np.unique(np.geomspace(1, count, CURVE_POINTS).round().astype(int))
    else:
        places = np.linspace(1, count, CURVE_POINTS).round().astype(int)
    return {x: places.tolist(), y: curve[places - 1].tolist()}
