"""The reference scan: the cell, once per token, under autograd."""

import torch
from torch import Tensor

from groundlm.model import cell
from groundlm.model.cell import Carry, CellParams


def reference_scan(
    token_BTD: Tensor,
    params: CellParams,
    carry: Carry,
    resets_BT: Tensor | None = None,
    mask_BT: Tensor | None = None,
) -> tuple[Tensor, Carry]:
    """Walk the window token by token; see `groundlm.ops.grounded_scan` for the contract."""
    predicted, grounded, memory = carry
    outputs = []
    for t in range(token_BTD.shape[1]):
        if resets_BT is not None:
            predicted, grounded, memory = (
                x if x is None else torch.where(_over(resets_BT[:, t], x), x.new_zeros(()), x)
                for x in (predicted, grounded, memory)
            )
        after = cell.step(token_BTD[:, t], predicted, grounded, memory, params)
        if mask_BT is not None:
            after = tuple(
                new if old is None else torch.where(_over(mask_BT[:, t], old), new, old)
                for new, old in zip(after, (predicted, grounded, memory), strict=True)
            )
        predicted, grounded, memory = after
        outputs.append(predicted)
    return torch.stack(outputs, 1), (predicted, grounded, memory)


def _over(flag_B: Tensor, like: Tensor) -> Tensor:
    """A flag per row, shaped to broadcast over `like` [B, ...]."""
    return flag_B.view(-1, *[1] * (like.dim() - 1))
