"""What a GPN expects before and after it predicts, token by token.

T tokens, D state, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.analysis.collect import collect
from groundlm.analysis.taps import listening, require_gpn
from groundlm.evaluation.scoring import evaluating
from groundlm.model import cell


@dataclass(frozen=True)
class Lens:
    """A text seen through the decoder, from the zero state on; everything by token."""

    ids_T: np.ndarray
    surprisal_T: np.ndarray
    """Nats of each token given those before it (the first: given nothing)."""
    predicted_ids_TX: np.ndarray
    """The X most likely next tokens by s^p, best first."""
    predicted_probability_TX: np.ndarray
    grounded_ids_TX: np.ndarray
    """The same read from s^g, before the predict layers."""
    grounded_probability_TX: np.ndarray
    norms: dict[str, np.ndarray]
    """Budget of the step: norms [T] of what each layer adds (`0.carried`, `0.ffn`, `0.read`)."""
    openness: dict[str, np.ndarray]
    """Mean openness [T] of each gate of the state."""


@torch.inference_mode()
def look(model: PreTrainedModel, ids_T: np.ndarray, top: int = 5) -> Lens:
    """Read a text from the zero state and decode s^p and s^g after every token.

    Raises `UserError` for a model that is no GPN or a state that is not finite.
    """
    gpn = require_gpn(model).model
    ids_T = np.asarray(ids_T, dtype=np.int64)
    found: dict[str, list[Tensor]] = {"predicted": [], "grounded": []}

    def listen(place: str, value: Tensor) -> None:
        if place in found:
            found[place].append(value)

    with evaluating(model), listening(model, "*", listen):
        figures = collect(model, ids_T[None], 1)
    logits = {
        name: cell.linear(gpn.decoder_hidden(torch.cat(states)), gpn.embedding.weight).double()
        for name, states in found.items()
    }
    nothing_1D = torch.zeros_like(found["predicted"][0])
    start_1W = cell.linear(gpn.decoder_hidden(nothing_1D), gpn.embedding.weight).double()
    before_TW = torch.cat([start_1W, logits["predicted"][:-1]])
    targets_T = torch.from_numpy(ids_T).to(before_TW.device)
    surprisal_T = torch.nn.functional.cross_entropy(before_TW, targets_T, reduction="none")
    best = {name: x.softmax(-1).topk(min(top, x.shape[1])) for name, x in logits.items()}
    return Lens(
        ids_T,
        surprisal_T.cpu().numpy(),
        best["predicted"].indices.cpu().numpy(),
        best["predicted"].values.cpu().numpy(),
        best["grounded"].indices.cpu().numpy(),
        best["grounded"].values.cpu().numpy(),
        {name: norm_NT[0] for name, norm_NT in figures.norms_NT.items()},
        {name: open_NT[0] for name, open_NT in figures.openness_NT.items()},
    )
