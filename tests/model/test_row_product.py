"""The compiled product of one row: its numbers, when it is taken, and life without it."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from groundlm import compiled
from groundlm.model import cell, products, row_product

SIZES = [(1, 1), (1, 31), (2, 32), (3, 33), (5, 64), (64, 1), (7, 100), (130, 1100)]
BOUNDS = {"rtol": 1e-5, "atol": 1e-5}


def forget() -> None:
    compiled.load.cache_clear()
    row_product._function.cache_clear()


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small matrices take it too, on any maker's processor."""
    monkeypatch.setattr(products, "made_by_intel", lambda: False)
    monkeypatch.setattr(row_product, "SMALLEST", dict.fromkeys(row_product.KINDS, 1))
    forget()
    yield
    forget()


@pytest.fixture
def taken(monkeypatch) -> list[torch.Size]:
    """Shapes of the weights whose product it was, in order."""
    shapes: list[torch.Size] = []
    original = cell.row_product

    def noting(x, weight_NK):
        shapes.append(weight_NK.shape)
        return original(x, weight_NK)

    monkeypatch.setattr(cell, "row_product", noting)
    return shapes


def operands(rows: int, width: int, dtype=torch.float32, offset: int = 0):
    """x [1, K] and weight [N, K], both `offset` numbers behind an aligned address."""
    torch.manual_seed(0)
    x = torch.randn(offset + width)[offset:].view(1, width)
    weight = torch.randn(offset + rows * width).to(dtype)[offset:].view(rows, width)
    return x, weight


@pytest.mark.parametrize("dtype", row_product.KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("offset", [0, 3])
@torch.no_grad()
def test_same_product(taken, dtype, sizes, offset):
    x, weight = operands(*sizes, dtype, offset)
    for shaped in (x, x[0], x[None]):
        y = cell.linear(shaped, weight)
        wanted = F.linear(shaped.double(), weight.double())
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), wanted, **BOUNDS)
    assert taken == [weight.shape] * 3


@torch.no_grad()
def test_strided_row_and_bias(taken):
    _, weight = operands(6, 40)
    x, bias = torch.randn(40, 3).T[1:2], torch.randn(6)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(cell.linear(x, weight, bias).double(), wanted, **BOUNDS)
    assert taken


@pytest.mark.parametrize("dtype", row_product.KINDS)
@torch.no_grad()
def test_threads_and_addresses_leave_the_bits(dtype):
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for offset in (0, 1):
                x, weight = operands(1001, 301, dtype)
                x = torch.cat([torch.zeros(1, offset), x], 1)[:, offset:]
                results.append(row_product.row_product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, results[0]) for y in results)


def test_not_taken(taken):
    x, weight = operands(6, 40)
    cell.linear(x, weight.requires_grad_()).sum().backward()
    torch.testing.assert_close(weight.grad, x.expand(6, 40))
    with torch.no_grad():
        weight = weight.detach()
        cases = {
            "two rows": (x.expand(2, 40), weight),
            "no row": (x[:0], weight),
            "columns side by side": (x, weight.T.contiguous().T),
            "part of a row": (x[:, :20], weight[:, :20]),
            "empty": (x, weight[:0]),
            "float64": (x.double(), weight.double()),
            "float64 x": (x.double(), weight),
        }
        for case, (a, b) in cases.items():
            wanted = F.linear(a.double(), b.double())
            y = cell.linear(a, b)
            torch.testing.assert_close(y.double(), wanted, **BOUNDS, msg=case)
            assert y.dtype == a.dtype, case
        with torch.autocast("cpu", torch.bfloat16):
            cell.linear(x, weight)
    assert not taken


@torch.no_grad()
def test_small_weights_stay_with_torch(taken, monkeypatch):
    x, weight = operands(6, 40)
    monkeypatch.setattr(row_product, "SMALLEST", {torch.float32: 6 * 40 + 1})
    cell.linear(x, weight)
    cell.linear(x.bfloat16(), weight.bfloat16())
    assert not taken


def no_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)


def no_compilation(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def intel(monkeypatch):
    monkeypatch.setattr(products, "made_by_intel", lambda: True)


@pytest.mark.parametrize("without", [no_compiler, no_compilation, intel])
@torch.no_grad()
def test_life_without(taken, monkeypatch, without):
    without(monkeypatch)
    x, weight = operands(6, 40)
    wanted = F.linear(x.double(), weight.double())
    torch.testing.assert_close(cell.linear(x, weight).double(), wanted, **BOUNDS)
    assert not taken


@torch.no_grad()
def test_without_openmp(taken, monkeypatch):
    build = compiled._build

    def only_simd(compiler, source, openmp):
        if openmp == "-fopenmp":
            raise OSError("undefined symbol: GOMP_parallel")
        return build(compiler, source, openmp)

    monkeypatch.setattr(compiled, "_build", only_simd)
    x, weight = operands(600, 400)
    wanted = F.linear(x.double(), weight.double())
    torch.testing.assert_close(cell.linear(x, weight).double(), wanted, rtol=1e-4, atol=1e-4)
    assert taken


@torch.no_grad()
def test_wrapped_tensors_get_past_it():
    x, weight = operands(6, 40)
    several = torch.randn(3, 1, 40)
    mapped = torch.vmap(lambda one: cell.linear(one, weight))(several)
    torch.testing.assert_close(mapped, F.linear(several, weight))
    with FakeTensorMode() as mode:
        fake = cell.linear(mode.from_tensor(x), mode.from_tensor(weight))
    assert fake.shape == (1, 6)


@pytest.mark.parametrize("dtype", row_product.KINDS)
@torch.no_grad()
def test_torch_compiles_around_it(dtype):
    x, weight = operands(6, 40, dtype)
    compiled_linear = torch.compile(cell.linear, backend="eager", fullgraph=True)
    bounds = BOUNDS if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(compiled_linear(x, weight), cell.linear(x, weight), **bounds)


@pytest.mark.parametrize("dtype", row_product.KINDS)
@torch.no_grad()
def test_every_product_of_a_step(tiny, taken, monkeypatch, dtype):
    model = tiny(dtype=dtype)
    exact = tiny()
    exact.load_state_dict(model.state_dict())
    state = exact_state = None
    for token in (5, 7, 11, 2):
        ids = torch.tensor([[token]])
        out, wanted = model(ids, state=state), exact(ids, state=exact_state)
        state, exact_state = out.state, wanted.state
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2]
    assert len(taken) == 4 * len(matrices)  # the embedding is a matrix of the decoder
    torch.testing.assert_close(out.logits.double(), wanted.logits, rtol=1e-4, atol=1e-5)
