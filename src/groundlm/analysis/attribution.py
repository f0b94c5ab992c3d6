"""Exact attribution of memory reads to the tokens that wrote what was read.

With the whole text as one chunk the read is a sum over source tokens i <= t:

    M_t^T q_t = sum_i exp(G_t - G_i) (k_i . q_t) u_i,    u_i = beta_i (v_i - M_{i-1}^T k_i)

with G the sums of the log-decay. The read gate, the norm over all values (its scale held at what it
was) and W_o are linear in the read, and so is the decoder with its scale held; so each part has
its own share of a logit. P positions, T tokens, H heads, V value width, D state, Y = H * V.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.analysis.taps import listening, require_gpn
from groundlm.errors import UserError
from groundlm.evaluation.scoring import evaluating
from groundlm.model import cell


@dataclass(frozen=True)
class Attribution:
    """Parts of one layer's reads at P positions, in the dtype of the state.

    Sources after a position have zeros.
    """

    positions: list[int]
    parts_PTHV: np.ndarray
    """What each source token adds to each head's answer M^T q; sums over T to the answer."""
    answer_PHV: np.ndarray
    share_PTH: np.ndarray
    """Part along the answer over the answer's length, (part . answer) / |answer|^2: sums to 1 over
    T (to 0 where the answer is zero); negative for a source that the others outweigh."""
    effect_PTH: np.ndarray
    """What each part adds to the logit of the target token, straight through the layer's W_o and
    the decoder (exact for the last layer; later layers' reaction is not part of it)."""
    target_ids: list[int]


@torch.inference_mode()
def attribute_reads(
    model: PreTrainedModel,
    ids_T: np.ndarray,
    positions: list[int],
    target_ids: list[int] | None = None,
    layer: int = -1,
) -> Attribution:
    """Attribute the reads after the tokens at `positions` of a text that starts at the zero state.

    Args:
        ids_T: int64 [T].
        target_ids: the token whose logit each position's effect is on. None: the most likely one.
        layer: the predict layer that reads.

    Raises:
        UserError: a model without memory or under an intervention, a position outside the text,
            targets of another number.
    """
    gpn = require_gpn(model).model
    if gpn._forward_pre_hooks:
        raise UserError("reads are attributed for a model as it is: leave the intervention first")
    if gpn.memory is None:
        raise UserError("reads are attributed for a gpn with a memory, this one has none")
    if bad := [t for t in positions if not 0 <= t < len(ids_T)]:
        raise UserError(f"position {bad[0]} is outside the text of {len(ids_T)} tokens")
    layer = range(len(gpn.predict))[layer]
    at = f"predict.{layer}."
    of_layer = (f"{at}query", f"{at}answer", f"{at}read_gate")
    kept = ("write.key", "write.log_decay", "predicted", *of_layer)
    seen: dict[str, list[Tensor]] = {place: [] for place in (*kept, "written")}
    step: dict[str, Tensor] = {}

    def listen(place: str, value: Tensor) -> None:
        if place in kept:
            seen[place].append(value)
        if place == "memory":  # what was written, so that no memory but the last is kept
            before = step.get("memory", torch.zeros_like(value))
            fix_1HV = step["write.value"] - cell.recall(before, step["write.key"])
            seen["written"].append(step["write.beta"].unsqueeze(-1) * fix_1HV)
        step[place] = value

    with evaluating(model), listening(model, "*", listen):
        gpn(torch.from_numpy(np.asarray(ids_T))[None].to(gpn.embedding.weight.device))
    written_THV = torch.cat(seen["written"])
    sums_TH = torch.cat(seen["write.log_decay"]).cumsum(0)
    keys_THK = torch.cat(seen["write.key"])
    chosen = torch.tensor(positions, dtype=torch.int64, device=sums_TH.device)
    query_PHK = torch.cat(seen[at + "query"])[chosen]
    past_PT1 = (torch.arange(len(sums_TH), device=chosen.device) <= chosen[:, None])[..., None]
    lost_PTH = (sums_TH[chosen][:, None] - sums_TH).masked_fill(~past_PT1, -torch.inf).exp()
    weight_PTH = lost_PTH * torch.einsum("thk,phk->pth", keys_THK, query_PHK)
    parts_PTHV = weight_PTH[..., None] * written_THV
    answer_PHV = torch.cat(seen[at + "answer"])[chosen]
    size_P1H = answer_PHV.square().sum(-1).unsqueeze(1)
    along_PTH = torch.einsum("pthv,phv->pth", parts_PTHV, answer_PHV)
    share_PTH = along_PTH / size_P1H.where(size_P1H > 0, 1)
    predicted_PD = torch.cat(seen["predicted"])[chosen]
    targets_P = _targets(model, predicted_PD, target_ids)
    slope_PY = _slope(
        model, layer, predicted_PD, answer_PHV, seen[at + "read_gate"], chosen, targets_P
    )
    effect_PTH = torch.einsum("pthv,phv->pth", parts_PTHV, slope_PY.view_as(answer_PHV))
    return Attribution(
        positions,
        parts_PTHV.cpu().numpy(),
        answer_PHV.cpu().numpy(),
        share_PTH.cpu().numpy(),
        effect_PTH.cpu().numpy(),
        targets_P.tolist(),
    )


def _targets(model: PreTrainedModel, predicted_PD: Tensor, target_ids: list[int] | None) -> Tensor:
    if target_ids is None:
        gpn = require_gpn(model).model
        logits_PW = cell.linear(gpn.decoder_hidden(predicted_PD), gpn.embedding.weight)
        return logits_PW.argmax(-1)
    if len(target_ids) != len(predicted_PD):
        raise UserError(f"{len(target_ids)} targets for {len(predicted_PD)} positions")
    return torch.tensor(target_ids, dtype=torch.int64, device=predicted_PD.device)


def _slope(
    model: PreTrainedModel,
    layer: int,
    predicted_PD: Tensor,
    answer_PHV: Tensor,
    read_gates: list[Tensor],
    chosen: Tensor,
    targets_P: Tensor,
) -> Tensor:
    """Change of each target's logit per change of the answer, both scales held: [P, Y]."""
    gpn = require_gpn(model).model
    read, decode, dtype = gpn.cell_params().predict[layer].read, gpn.decode, predicted_PD.dtype
    assert read is not None
    target_PE = gpn.embedding.weight[targets_P].to(dtype)
    by_state_PD = target_PE @ decode.proj.weight.to(dtype) * decode.norm.weight.to(dtype)
    by_state_PD = by_state_PD * _inverse_rms(predicted_PD, gpn.norm_eps)
    by_gated_PY = by_state_PD @ read.out_DY.to(dtype)
    scale_PY = torch.cat(read_gates)[chosen] * read.out_norm_Y.to(dtype)
    return by_gated_PY * scale_PY * _inverse_rms(answer_PHV.flatten(-2), gpn.norm_eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
