"""A short text seen through the lenses and, with a memory, through the attribution of its reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groundlm.analysis.attribution import attribute_reads
from groundlm.analysis.lens import look
from groundlm.analysis.taps import require_gpn

TOP = 3
ATTRIBUTED = 6
SOURCES = 5


def example(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ids_T: np.ndarray
) -> dict[str, Any]:
    """What a GPN expects at each token of a text, and where its last reads come from.

    Returns the number of `layers`; `tokens`, for each its text, surprisal in nats, top tokens by
    s^p and by s^g, norms and gates; and `reads` of the last layer, for the last positions the token
    predicted and the source tokens of the largest effect on its logit, with effect and share by
    head.
    """
    lens = look(model, ids_T, TOP)

    def text(token: int) -> str:
        return tokenizer.decode([int(token)])

    tokens = [
        {
            "text": text(ids_T[t]),
            "surprisal_nats": float(lens.surprisal_T[t]),
            "by_predicted": [text(i) for i in lens.predicted_ids_TX[t]],
            "by_grounded": [text(i) for i in lens.grounded_ids_TX[t]],
            "norms": {name: float(x[t]) for name, x in lens.norms.items()},
            "openness": {name: float(x[t]) for name, x in lens.openness.items()},
        }
        for t in range(len(ids_T))
    ]
    found_layers = len(require_gpn(model).model.predict)
    if require_gpn(model).model.memory is None:
        return {"layers": found_layers, "tokens": tokens, "reads": []}
    positions = list(range(max(0, len(ids_T) - ATTRIBUTED), len(ids_T)))
    found = attribute_reads(model, ids_T, positions)
    reads = []
    for p, position in enumerate(positions):
        effect_T = found.effect_PTH[p].sum(-1)
        sources = np.argsort(-np.abs(effect_T[: position + 1]), kind="stable")[:SOURCES]
        reads.append(
            {
                "position": position,
                "read_after": text(ids_T[position]),
                "target": text(found.target_ids[p]),
                "logit_from_reads": float(effect_T.sum()),
                "sources": [
                    {
                        "position": int(i),
                        "text": text(ids_T[i]),
                        "logit": float(effect_T[i]),
                        "share_by_head": found.share_PTH[p, i].astype(float).tolist(),
                    }
                    for i in sources
                ],
            }
        )
    return {"layers": found_layers, "tokens": tokens, "reads": reads}
