"""Taps as context managers: listen to a GPN, or change what it computes, while inside.

The places of a tap are those of `groundlm.model.cell.Tap`; a pattern may hold wildcards, as in
`predict.*.read`. Tapped windows walk the reference cell, and no other copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from groundlm.errors import UserError
from groundlm.model.cell import Tap
from groundlm.model.modeling import GPNForCausalLM

TapMaker = Callable[[], Tap]
"""Makes the tap of one forward call, so that what a tap counts starts anew with each call."""


def require_gpn(model: PreTrainedModel) -> GPNForCausalLM:
    """The model, if it is a GPN; `UserError` if not."""
    if not isinstance(model, GPNForCausalLM):
        raise UserError(f"taps need a gpn, this model is a {model.config.model_type}")
    return model


@contextmanager
def tapped(model: PreTrainedModel, make_tap: TapMaker) -> Iterator[None]:
    """Every forward call inside gets a tap of its own; taps further in see what outer ones made.

    Calls of single tokens, as in generation, are forward calls of their own.
    """
    base = require_gpn(model).model
    at_rest = base.tap

    def attach(*_: Any) -> None:
        tap = make_tap()
        base.tap = tap if base.tap is None else _chain(base.tap, tap)

    def detach(*_: Any) -> None:
        base.tap = at_rest

    handles = [
        base.register_forward_pre_hook(attach),
        base.register_forward_hook(detach, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        base.tap = at_rest


def _chain(first: Tap, second: Tap) -> Tap:
    return lambda place, value: second(place, first(place, value))


@contextmanager
def listening(
    model: PreTrainedModel, pattern: str, listen: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `listen(place, value)` for every value at places that match; nothing changes.

    Raises `UserError` at the end if the model was called and no place matched.
    """

    def hear(place: str, value: Tensor) -> Tensor:
        listen(place, value)
        return value

    with changing(model, {pattern: hear}):
        yield


@contextmanager
def replacing(
    model: PreTrainedModel, pattern: str, change: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Replace every value at places that match by `change(value)`, of the same shape.

    Raises `UserError` at the end if the model was called and no place matched.
    """
    with changing(model, {pattern: lambda place, value: change(value)}):
        yield


@contextmanager
def changing(model: PreTrainedModel, changes: dict[str, Tap]) -> Iterator[None]:
    """Replace values by `changes[pattern](place, value)`, by the first pattern that matches.

    Raises `UserError` at the end if the model was called and a pattern matched no place.
    """
    unmatched, called = set(changes), False

    def tap(place: str, value: Tensor) -> Tensor:
        nonlocal called
        called = True
        for pattern, change in changes.items():
            if fnmatchcase(place, pattern):
                unmatched.discard(pattern)
                return change(place, value)
        return value

    with tapped(model, lambda: tap):
        yield
    if called and unmatched:
        raise UserError(f"no place of the model matches {min(unmatched)!r}")
