"""Memory that training frees stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from groundlm.allocator import USERS_OWN
from groundlm.training import loop

COUNT_FAULTS = """
import resource, torch
from groundlm.allocator import keep_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
took, counts = {call}, []
for _ in range(6):
    before = faults()
    for size in (1 << 24, 1 << 26):
        torch.ones(size), torch.ones(size)
    counts.append(faults() - before)
print(took, min(counts))
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def faults(call: str, **variables: str) -> tuple[str, int]:
    """What the call returned, and the pages that a round of large tensors asked for anew.

    The least of six rounds: how many the heap needs to grow to its full size depends on how earlier
    small objects lie in it.
    """
    clean = {name: value for name, value in os.environ.items() if name not in USERS_OWN}
    run = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS.format(call=call)],
        env=clean | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    took, count = run.stdout.split()
    return took, int(count)


@glibc
def test_freed_tensors_are_used_again() -> None:
    took, kept = faults("keep_freed_memory()")
    _, returned = faults("None")
    assert took == "True"
    assert kept < 100 < 100_000 < returned


@glibc
def test_an_allocator_that_the_user_set_is_left_alone() -> None:
    took, count = faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")
    assert took == "False"
    assert count > 100_000


def test_training_asks_for_it(train_config, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: calls.append(1))
    loop.run_train(train_config(training__steps=1))
    assert calls
