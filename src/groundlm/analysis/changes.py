"""The interventions that `groundlm ablate` makes on a model, each with the means it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from groundlm.analysis import interventions as act
from groundlm.analysis.collect import Collected, collect
from groundlm.analysis.horizons import bounded, memory_horizons, pools, retention
from groundlm.analysis.means import place_means


@dataclass(frozen=True)
class Change:
    """One intervention: its name, what it does in words, and the context manager to enter."""

    name: str
    what: str
    enter: Callable[[], act.Intervention]
    first: int = 0
    """The first target of a window that it can reach."""
    period: int | None = None
    """It starts anew every so many tokens; None: once."""

    @property
    def from_some_token(self) -> bool:
        """Whether it begins at a token, so that its effect has an age."""
        return bool(self.first or self.period)


def known_changes(
    model: PreTrainedModel,
    ids_NT: np.ndarray,
    after_tokens: int = 64,
    resets: Sequence[int] = (8, 32, 128),
    batch_size: int = 32,
) -> list[Change]:
    """All interventions that the model has the parts for, with the means of its own windows.

    Those that could not act, a reset, freeze or swap beyond the windows, are left out.

    Args:
        ids_NT: windows that means and horizons are taken from, int64 [N, T]; the last target of a
            window is its last token.
        after_tokens: when writing ends and the memory is frozen or swapped (not at 0).
        resets: lengths after which the state is reset.
    """
    seen = collect(model, ids_NT, batch_size)
    means = place_means(model, ids_NT, ["ground.gate", "predict.*.ffn"], batch_size)
    mean_D = seen.states_NTD.mean((0, 1), dtype=np.float64)
    ffn = {place: value for place, value in means.items() if place.endswith(".ffn")}
    gate = {"ground.gate": means["ground.gate"]}
    changes = [
        Change("sbar_projected_out", "the direction of the mean state taken out of every state",
               partial(act.project_out, model, mean_D)),
        Change("sbar_zero", "the mean state subtracted from every state",
               partial(act.subtract, model, mean_D)),
        Change("ffn_mean", "the FFN's output replaced by its mean", partial(act.fix, model, ffn)),
        Change("ground_gate_mean", "the grounding gate held at its mean",
               partial(act.fix, model, gate)),
    ]  # fmt: skip
    if seen.log_decay_NTH is not None:
        changes += _memory_changes(model, seen)
        if after_tokens < ids_NT.shape[1] - 1:
            changes += _late_changes(model, after_tokens, ids_NT[-1, -after_tokens - 1 :])
    return changes + [
        Change(f"reset_every_{n}", f"the state reset every {n} tokens",
               partial(act.reset_every, model, n), first=n, period=n)
        for n in resets
        if n < ids_NT.shape[1] - 1
    ]  # fmt: skip


def _memory_changes(model: PreTrainedModel, seen: Collected) -> list[Change]:
    assert seen.log_decay_NTH is not None
    decay_H = bounded(seen.log_decay_NTH).mean((0, 1), dtype=np.float64)
    horizons = memory_horizons(retention(seen.log_decay_NTH))["horizon_tokens"]
    fast, slow = pools(horizons)
    named = {f"head_{h}": [h] for h in range(len(horizons))}
    named |= {name: heads for name, heads in (("fast_pool", fast), ("slow_pool", slow)) if heads}
    changes = [
        Change("read_off", "nothing read from the memory", partial(act.read_off, model)),
        Change("keys_shuffled", "every value written under the key of some earlier token",
               partial(act.shuffle_keys, model)),
    ]  # fmt: skip
    for name, heads in named.items():
        which = ("head " if len(heads) == 1 else "heads ") + ", ".join(map(str, heads))
        if len(heads) == 1 and horizons[heads[0]] is not None:
            which += f" (horizon {horizons[heads[0]]:.1f} tokens)"
        changes += [
            Change(f"{name}_silenced", f"{which} kept out of the read",
                   partial(act.silence_heads, model, heads)),
            Change(f"{name}_decay_mean", f"the decay of {which} held at its mean",
                   partial(act.clamp_decay, model, heads, decay_H)),
        ]  # fmt: skip
    return changes


def _late_changes(model: PreTrainedModel, after: int, other_ids_T: np.ndarray) -> list[Change]:
    """What happens to the memory after some tokens; `other_ids_T`: a text to take another from."""
    changes = [
        Change("write_off", f"nothing written after {after} tokens: the memory only decays",
               partial(act.write_off, model, after), first=after),
        Change("memory_frozen", f"the memory frozen after {after} tokens",
               partial(act.freeze_memory, model, after), first=after),
    ]  # fmt: skip
    if after:
        memory_HKV = act.memory_after(model, other_ids_T[-after:])
        changes.append(
            Change("memory_swapped", f"the memory of another text after {after} tokens",
                   partial(act.swap_memory, model, after, memory_HKV), first=after - 1)
        )  # fmt: skip
    return changes
