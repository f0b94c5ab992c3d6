"""Equal parameters: the free width of a model set so that its count meets a target."""

from __future__ import annotations

from typing import Any

from groundlm.errors import UserError
from groundlm.models import build_config, count_parameters

FREE_WIDTHS = {
    "gpn": "ffn_size",
    "llama": "intermediate_size",
    "gated_delta_net": "intermediate_size",
    "mamba2": "state_size",
}
"""The size that is set, by model type. Mamba-2 has no ffn, and its inner width moves in whole
multiples of its outer one, so its state is what can be set finely."""

TOLERANCE = 0.01
STEP = 8


def match_parameters(
    sizes: dict[str, Any], target: int, free: str | None = None, tolerance: float = TOLERANCE
) -> dict[str, Any]:
    """The sizes of a model, one of them changed so that it has about `target` parameters.

    Sizes that come within `tolerance` (a fraction of the target) are left as they are. Otherwise
    `free`, or else the width of `FREE_WIDTHS`, becomes the multiple of 8 that comes nearest, or the
    nearest number where none of those comes within the tolerance. No weights are made.

    Args:
        sizes: as for `groundlm.models.build_model`.
        free: a size in which the count is a straight line: widths of an ffn, numbers of layers.

    Raises:
        UserError: no value meets the target, with the nearest one and its count.
    """
    sizes = dict(sizes)
    kind = sizes.get("model_type", "gpn")
    name = free or FREE_WIDTHS.get(kind)
    if name is None:
        raise UserError(f"no free width is known for models of type {kind}: name one")
    if not hasattr(build_config(sizes), name):
        raise UserError(f"models of type {kind} have no size {name}")

    def count(width: int) -> int:
        return count_parameters(sizes | {name: width})["total"]

    def is_met(found: int) -> bool:
        return abs(found - target) <= tolerance * target

    if is_met(count_parameters(sizes)["total"]):
        return sizes
    smallest = count(STEP)
    slope = (count(2 * STEP) - smallest) / STEP
    if not slope:
        raise UserError(f"model.{name} does not change the parameters of a {kind}")
    exact = STEP + (target - smallest) / slope
    for step in (STEP, 1):
        width = max(step, round(exact / step) * step)
        if is_met(found := count(width)):
            return sizes | {name: width}
    raise UserError(
        f"a {kind} cannot have {target:,} parameters within {tolerance:.1%} by its {name}: "
        f"{width:,} gives {found:,}"
    )
