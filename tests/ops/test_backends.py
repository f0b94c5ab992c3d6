"""Which backend walks a window, and what is said about it; compiled code and its absence."""

import functools
import gc
import logging
import shutil
import subprocess
import weakref

import pytest
import torch
from problems import Problem, assert_same

from groundlm import compiled
from groundlm.errors import UserError
from groundlm.model.state import GPNState
from groundlm.ops import (
    BACKENDS,
    fused_forward,
    fused_run,
    grounded_scan,
    native,
    resolve_backend,
    scan,
    stages,
)
from groundlm.ops.fused import ScanSettings, fused_scan, settings_in_use, use_settings
from groundlm.ops.reference import reference_scan


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of the backends that walked, in order."""
    walked: list[str] = []

    def noting(name):
        original = BACKENDS[name]

        def walk(*args):
            walked.append(name)
            return original(*args)

        return walk

    for name in list(BACKENDS):
        monkeypatch.setitem(BACKENDS, name, noting(name))
    monkeypatch.setattr(scan, "_logged", set())
    return walked


def walk(problem: Problem, backend: str = "auto"):
    predicted, grounded, memory = problem.carry
    seen = torch.zeros(problem.batch, dtype=torch.int64)
    state = GPNState(predicted, grounded, memory, seen)
    return grounded_scan(problem.token_BTD, problem.params, state, backend=backend)


def test_auto_takes_fused_for_long_windows_and_the_cell_for_short_ones(calls):
    for time in (1, 15, 16, 40):
        walk(Problem(time=time))
    assert calls == ["reference", "reference", "fused", "fused"]


def test_one_row_of_a_large_model_walks_the_cell_where_folding_would_not_pay(calls, monkeypatch):
    problem = Problem(time=20)
    weights = sum(x.numel() for x in stages.flatten(problem.params).values())
    monkeypatch.setattr(scan, "WEIGHTS_PER_TOKEN", weights // 21)  # pays from 21 tokens on
    for time, batch in ((20, 1), (21, 1), (20, 2)):
        with torch.no_grad():
            walk(Problem(time=time, batch=batch))
        walk(Problem(time=time, batch=batch))  # a gradient is fused's from 16 tokens on
    assert calls == ["reference", "fused", "fused", "fused", "fused", "fused"]


def test_choice_is_said_once(calls, caplog):
    with caplog.at_level(logging.INFO, logger="groundlm.ops.scan"):
        assert resolve_backend("auto") == "fused"
        resolve_backend("fused")
    assert [r.message for r in caplog.records] == ["scan backend: fused"]


def test_unknown_backend_is_refused():
    with pytest.raises(UserError, match="fsued"):
        resolve_backend("fsued")


def test_mixed_dtypes_fall_back_by_name_and_once(calls, caplog):
    problem = Problem(time=20)
    problem.token_BTD = problem.token_BTD.detach().float()
    with caplog.at_level(logging.INFO, logger="groundlm.ops.scan"):
        for _ in range(2):
            try:
                walk(problem)
            except RuntimeError:  # what the reference makes of the mixture is its own affair
                break
    assert calls[0] == "reference"
    said = [r.message for r in caplog.records if "instead of fused" in r.message]
    assert len(said) == 1
    assert "float32" in said[0]
    with pytest.raises(ValueError, match="cannot run"):
        fused_scan(problem.token_BTD, problem.params, problem.carry)


def test_settings_hold_inside_the_block_only():
    before = settings_in_use()
    with use_settings(ScanSettings(chunk_tokens=4)):
        assert settings_in_use().chunk_tokens == 4
    assert settings_in_use() is before


@pytest.fixture
def fresh_library():
    compiled.load.cache_clear()
    yield
    compiled.load.cache_clear()


def check_plain(caplog) -> None:
    problem = Problem(time=20)
    with caplog.at_level(logging.INFO, logger="groundlm.compiled"):
        found = problem.run(fused_scan)
        problem.run(fused_scan)
    assert_same(found, problem.run(reference_scan))
    assert not native.available(stages.sizes_of(problem.params, problem.carry[0]))
    assert len(caplog.records) == 1


def test_no_compiler_means_slower_not_broken(monkeypatch, caplog, fresh_library):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    check_plain(caplog)


def test_a_failing_compiler_means_slower_not_broken(monkeypatch, caplog, fresh_library):
    def run(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", run)
    check_plain(caplog)


def test_without_openmp_the_library_still_loads(monkeypatch, fresh_library):
    build = compiled._build

    def only_simd(compiler, text, openmp):
        if openmp == "-fopenmp":
            raise OSError("undefined symbol: GOMP_parallel")
        return build(compiler, text, openmp)

    monkeypatch.setattr(compiled, "_build", only_simd)
    problem = Problem(time=20)
    assert native.available(stages.sizes_of(problem.params, problem.carry[0]))
    assert_same(problem.run(fused_scan), problem.run(reference_scan))


def test_compiled_and_plain_agree_in_float32(monkeypatch):
    sizes = {"batch": 3, "time": 40, "state": 48, "ffn": 64, "key": 16, "value": 32, "layers": 2}
    problem = Problem(dtype=torch.float32, **sizes)
    compiled = problem.run(fused_scan)
    assert_same(problem.run(fused_scan, settings=ScanSettings(compiled=False)), compiled, 1e-4)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert_same(problem.run(fused_scan), compiled, 1e-4)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("time", [1, 16, 17, 100])
def test_recompute_changes_nothing(backend, time):
    problem = Problem(time=time, layers=2, resets=True, mask=True)
    outputs, grads = problem.run(BACKENDS[backend])
    cut_outputs, cut_grads = problem.run(BACKENDS[backend], recompute=True)
    for name, x in outputs.items():
        assert torch.equal(x, cut_outputs[name]), name
    assert_same([cut_grads], [grads], 1e-12)


def test_recompute_of_the_reference_keeps_less():
    def kept(recompute):
        held = []
        problem = Problem(time=100)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
            reference_scan(problem.token_BTD, problem.params, problem.carry, recompute=recompute)
        return sum(x.numel() for x in held)

    assert kept(True) < kept(False) / 5


def test_recompute_cuts_the_fused_tape(monkeypatch):
    taken = []
    original = fused_run._take_tape

    def noting(s, steps, chunk):
        taken.append(steps)
        return original(s, steps, chunk)

    monkeypatch.setattr(fused_run, "_take_tape", noting)
    problem = Problem(time=400)
    problem.run(functools.partial(fused_scan, recompute=True))
    assert max(taken) <= 32
    assert min(taken) >= 16


def test_a_tape_is_freed_with_its_window(monkeypatch):
    """No cycle keeps it until the garbage collector comes by."""
    tapes = []

    class Noted(fused_forward.Tape):
        def __init__(self, *args):
            super().__init__(*args)
            tapes.append(weakref.ref(self))

    monkeypatch.setattr(fused_run, "Tape", Noted)
    gc.disable()
    try:
        problem = Problem(time=41, dtype=torch.float32)
        problem.run(fused_scan, settings=ScanSettings(spare_bytes=0))
        assert len(tapes) == 1
        assert tapes[0]() is None
    finally:
        gc.enable()
