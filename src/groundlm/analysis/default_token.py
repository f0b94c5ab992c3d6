"""The mean state s-bar, which the paper finds to act as a default prediction.

N windows, T tokens, D state, W vocabulary.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.stats import spearmanr
from torch import nn
from transformers import PreTrainedModel

from groundlm.evaluation.scoring import logit_slices
from groundlm.model import cell
from groundlm.model.modeling import GPNForCausalLM

BATCHES = 8
TOP = 10
NEAR = 0.98


def mean_state(mean_D: np.ndarray, covariance_DD: np.ndarray, norm_mean: float) -> dict[str, Any]:
    """Norm of s-bar, its share of the mean norm, and the principal direction of uncentred states.

    `cosine_with_top_direction` is absolute; `share_of_second_moment` is |s-bar|^2 / E|s|^2. None
    where s-bar or all states are zero.
    """
    norm = float(np.linalg.norm(mean_D))
    second_DD = covariance_DD + np.outer(mean_D, mean_D)
    total = float(np.trace(second_DD))
    last = len(mean_D) - 1
    top_D = eigh(second_DD, subset_by_index=(last, last), overwrite_a=True)[1][:, 0]
    return {
        "norm": norm,
        "share_of_mean_norm": norm / norm_mean if norm_mean > 0 else None,
        "cosine_with_top_direction": float(abs(top_D @ mean_D) / norm) if norm > 0 else None,
        "share_of_second_moment": norm**2 / total if total > 0 else None,
    }


def stability(states_ND: np.ndarray) -> dict[str, Any]:
    """Cosine between the means of 8 batches of consecutive states, over all pairs.

    None for fewer than 8 states.
    """
    if len(states_ND) < BATCHES:
        return {"batches": 0, "mean": None, "sd": None, "min": None}
    means = [part.mean(0, dtype=np.float64) for part in np.array_split(states_ND, BATCHES)]
    cosines = [cosine(a, b) for a, b in combinations(means, 2)]
    return {
        "batches": BATCHES,
        "mean": float(np.mean(cosines)),
        "sd": float(np.std(cosines)),
        "min": float(np.min(cosines)),
    }


def how_soon(states_NTD: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Cosine of each window's running mean of s^p with s-bar, averaged over windows, [T].

    s-bar is that of the other windows, so that no window is set against itself. Figures: after 1,
    10 and 100 tokens (None beyond the windows) and the first token of 0.98. Raises `ValueError` for
    fewer than two windows.
    """
    windows, tokens, _ = states_NTD.shape
    if windows < 2:
        raise ValueError("a single window has no others")
    total_D = states_NTD.sum((0, 1), dtype=np.float64)
    curve_T = np.zeros(tokens)
    for states_TD in states_NTD:
        sums_TD = np.cumsum(states_TD, 0, dtype=np.float64)
        mean_D = (total_D - sums_TD[-1]) / ((windows - 1) * tokens)
        sizes_T = np.linalg.norm(sums_TD, axis=1) * np.linalg.norm(mean_D)
        curve_T += np.divide(
            sums_TD @ mean_D, sizes_T, out=np.zeros_like(sizes_T), where=sizes_T > 0
        )
    curve_T /= windows
    reached = np.flatnonzero(curve_T >= NEAR)
    figures: dict[str, Any] = {
        f"after_{t}": float(curve_T[t - 1]) if t <= len(curve_T) else None for t in (1, 10, 100)
    }
    return figures | {
        f"first_token_of_{NEAR}": int(reached[0]) + 1 if len(reached) else None
    }, curve_T


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm between the last layer of a transformers model and its head; None if unknown."""
    base = model.base_model
    return getattr(base, "norm", None) or getattr(base, "norm_f", None)


@torch.inference_mode()
def decoded(model: PreTrainedModel, state_D: np.ndarray) -> np.ndarray:
    """Logits of a state through the model's decoder (norm and head), float64 [W]."""
    weight = model.get_input_embeddings().weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    state_1D = torch.from_numpy(np.array(state_D))[None].to(model.device, dtype)
    if isinstance(model, GPNForCausalLM):
        state_1D = model.model.decoder_hidden(state_1D)
    elif (norm := final_norm(model)) is not None:
        state_1D = norm(state_1D.to(weight.dtype))
    nothing = torch.zeros(1, dtype=torch.int64, device=model.device)
    ((logits_1W, _),) = logit_slices(model, state_1D, nothing)
    return logits_1W[0].double().cpu().numpy()


def top_tokens(logits_W: np.ndarray, count: int = TOP) -> tuple[list[int], list[float]]:
    """The most likely ids, best first (the smaller id at a tie), and their probabilities."""
    weights_W = np.exp(logits_W - logits_W.max())
    ids = np.argsort(-logits_W, kind="stable")[:count]
    return ids.tolist(), (weights_W[ids] / weights_W.sum()).tolist()


def rank_correlation(logits_W: np.ndarray, counts_W: np.ndarray) -> float | None:
    """Spearman's correlation of logits and token counts; None if either does not vary.

    Rows of a padded vocabulary, beyond the counts, are left out.
    """
    logits_W = logits_W[: len(counts_W)]
    if np.ptp(logits_W) == 0 or np.ptp(counts_W) == 0:
        return None
    return float(spearmanr(logits_W, counts_W).statistic)


@torch.inference_mode()
def fused_mean_embedding(model: GPNForCausalLM, vocabulary: int) -> np.ndarray:
    """The token contribution e of the mean over the embedding's first rows, float64 [D]."""
    ground = model.model.ground
    mean_E = model.model.embedding.weight[:vocabulary].mean(0)
    token_D = cell.token_contribution(
        mean_E, ground.token_norm.weight, ground.token_proj.weight, model.model.norm_eps
    )
    return token_D.double().cpu().numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two vectors; 0 if one of them is zero."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else 0.0
