"""Poisoned buffers for every test of the scans."""

import pytest
import torch
from torch import Tensor

from groundlm.ops import stages


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised buffers start as NaN, so that a number that nobody wrote shows."""

    def empty(s: stages.Sizes, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=s.dtype, device=s.device)

    for module in ("stages", "lazy_memory", "fused_forward", "fused_run", "native"):
        monkeypatch.setattr(f"groundlm.ops.{module}.empty", empty)
    monkeypatch.setattr("groundlm.ops.fused_run._leave_tape", lambda *_: None)
