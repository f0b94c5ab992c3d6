"""The learning rate of a model: the best of several on short runs, by held-out loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from groundlm.comparison.config import CompareConfig
from groundlm.comparison.matrix import Model, Run, sweep_runs
from groundlm.errors import RunFault, UserError


def settle_rate(
    config: CompareConfig, model: Model, train: Callable[[Run], dict[str, Any]]
) -> dict[str, Any]:
    """The model's `learning_rate`, where it is from (`source`), and what was tried (`sweep`).

    `train` takes a run to its end and returns its figures; a rate at which it raises `RunFault` is
    out. The held-out loss is that at the end of the short run, on `training.eval_windows` windows.

    Raises `UserError` when no rate can be trained with.
    """
    if model.config.learning_rate is not None:
        return {"learning_rate": model.config.learning_rate, "source": "own", "sweep": None}
    if not config.sweep.learning_rates:
        return {"learning_rate": config.optimizer.learning_rate, "source": "shared", "sweep": None}
    tried = []
    for rate, run in sweep_runs(config, model).items():
        try:
            nats = train(run)["heldout_nats_per_token"]
        except RunFault:
            nats = None
        tried.append({"learning_rate": rate, "heldout_nats_per_token": nats})
    scored = [t for t in tried if t["heldout_nats_per_token"] is not None]
    if not scored:
        raise UserError(f"{model.name}: no learning rate of the sweep gives a finite loss")
    best = min(scored, key=lambda t: t["heldout_nats_per_token"])["learning_rate"]
    rates = config.sweep.learning_rates
    return {
        "learning_rate": best,
        "source": "sweep",
        "sweep": {
            "steps": config.sweep.steps,
            "seed": config.seeds[0],
            "tried": tried,
            "at_edge": len(rates) > 1 and best in (min(rates), max(rates)),
        },
    }
