"""The state as an object: rows, files, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from groundlm import GPNState, UserError


@pytest.fixture
def state(m, ids) -> GPNState:
    """Four rows, the second one shorter by two tokens."""
    mask = torch.ones(4, 9, dtype=torch.int64)
    mask[1, :2] = 0
    return m(ids(4, 9), attention_mask=mask).state.detach()


def assert_equal(a: GPNState, b: GPNState) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        assert tensor.dtype == b.tensors()[name].dtype, name
        assert torch.equal(tensor, b.tensors()[name]), name


def test_size_does_not_depend_on_what_was_read(m, ids):
    sizes = {m(ids(1, n)).state.num_bytes for n in (1, 10, 200)}
    assert len(sizes) == 1
    assert m(ids(3, 10)).state.num_bytes == 3 * sizes.pop()


def test_tokens_seen_counts_real_tokens(state, m, ids):
    assert state.tokens_seen.tolist() == [9, 7, 9, 9]
    resets = torch.zeros(4, 5, dtype=torch.bool)
    resets[2, 3] = True
    assert m(ids(4, 5), state=state, resets=resets).state.tokens_seen.tolist() == [14, 12, 2, 14]


def test_a_step_leaves_the_old_state_alone(m, state, ids):
    before = state.clone()
    m(ids(4, 3), state=state)
    assert_equal(before, state)
    before.predicted_BD.zero_()
    assert state.predicted_BD.abs().max() > 0


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (2, [2]),
        (-1, [3]),
        ([3, 1, 1], [3, 1, 1]),
        (torch.tensor([0, 2]), [0, 2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, True, False]), [1, 2]),
        ([], []),
    ],
)
def test_rows(state, index, rows):
    chosen = state.rows(index)
    assert chosen.batch_size == len(rows)
    for name, tensor in chosen.tensors().items():
        assert torch.equal(tensor, state.tensors()[name][rows]), name
    if rows:
        chosen.predicted_BD.zero_()  # a copy, not a view
        assert state.predicted_BD[rows].abs().max() > 0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "row 4 is not there: the state has 4 rows"),
        ([-5], "row -5"),
        ([True], "1 booleans"),
        (1.5, "by whole numbers or booleans, not by 1.5"),
        ([0.7], "by whole numbers"),
        ([[0, 1], [1, 0]], "by whole numbers"),
        (None, "by whole numbers"),
        ("all", "by whole numbers"),
    ],
)
def test_rows_that_are_not_there(state, index, message):
    with pytest.raises(UserError, match=message):
        state.rows(index)


def test_concatenate_and_repeat(state, tiny):
    parts = [state.rows(0), state.rows([1, 2]), state.rows(slice(3, 4))]
    assert_equal(GPNState.concatenate(parts), state)
    assert_equal(state.repeat(2), state.rows([0, 0, 1, 1, 2, 2, 3, 3]))
    other = tiny(state_size=21).model.zero_state(1)
    with pytest.raises(UserError, match="states of two models"):
        GPNState.concatenate([state, other])
    with pytest.raises(UserError, match="no state"):
        GPNState.concatenate([])
    with pytest.raises(UserError, match="repeated -1 times"):
        state.repeat(-1)


def test_to_and_detach(state):
    half = state.to(dtype=torch.float32)
    assert half.predicted_BD.dtype == torch.float32
    assert half.tokens_seen.dtype == half.text_hash_B.dtype == torch.int64
    grown = state.map(lambda t: t * 2)
    grown.predicted_BD.requires_grad_()
    assert not grown.detach().predicted_BD.requires_grad


def test_a_float32_state_serves_a_float64_model(m, state, ids):
    x = ids(4, 3)
    out = m(x, state=state.to(dtype=torch.float32))
    assert out.state.predicted_BD.dtype == torch.float64
    torch.testing.assert_close(out.logits, m(x, state=state).logits, rtol=0, atol=1e-4)


def test_save_and_load(m, state, tmp_path):
    path = tmp_path / "state.safetensors"
    state.save(path, model=m)
    assert_equal(GPNState.load(path, m), state)
    first_bytes = path.read_bytes()
    state.save(path, model=m)
    assert path.read_bytes() == first_bytes
    whole = path.stat().st_size
    state.save(path, rows=[2, 0], model=m)
    assert_equal(GPNState.load(path, m), state.rows([2, 0]))
    assert path.stat().st_size < 0.75 * whole
    state.rows(1).save(path)  # without the model: the state's own sizes
    assert_equal(GPNState.load(path), state.rows(1))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("size", [{"state_size": 21}, {"vocab_size": 62}, {"ffn_size": 24}])
def test_a_state_of_another_model_is_refused(m, state, tiny, tmp_path, size):
    path = tmp_path / "state.safetensors"
    state.save(path, model=m)
    other = tiny(**{"num_heads": m.config.num_heads, "num_layers": m.config.num_layers} | size)
    name, value = next(iter(size.items()))
    have = getattr(m.config, name)
    message = f"state .* is of another model: its {name} is {have}, this model has {value}"
    with pytest.raises(UserError, match=message) as caught:
        GPNState.load(path, other)
    assert "\n" not in str(caught.value)


def test_a_state_of_other_weights_is_refused(m, state, tiny, tmp_path):
    """Sizes alone do not make it the same model; nor does training change the sizes."""
    path = tmp_path / "state.safetensors"
    state.save(path, model=m)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):  # of the same weights
        GPNState.load(path, m.to(dtype))
    GPNState.load(path, m.model)
    sizes = {"num_heads": m.config.num_heads, "num_layers": m.config.num_layers}
    other = tiny(seed=1, **sizes)
    for model in (other, other.model):
        with pytest.raises(UserError, match="of another model: it was written with other weights"):
            GPNState.load(path, model)
    x = torch.randint(1, 61, (2, 9))
    m.to(torch.float32)(x, labels=x).loss.backward()
    torch.optim.AdamW(m.parameters(), lr=1e-3).step()
    with pytest.raises(UserError, match="other weights"):
        GPNState.load(path, m)
    state.save(path)
    GPNState.load(path, other)


def test_a_state_of_other_heads_is_refused_by_forward(tiny, ids):
    x, state = ids(1, 3), tiny().model.zero_state(1)
    with pytest.raises(UserError, match="its num_heads is 3, this model has 0"):
        tiny(num_heads=0)(x, state=state)
    with pytest.raises(UserError, match="its head_v_dim is 7, this model has 8"):
        tiny(head_v_dim=8)(x, state=state)
    with pytest.raises(UserError, match="its head_v_dim is 7, this model has 8"):
        tiny(head_v_dim=8).generate(x, state=state, max_new_tokens=2)


def test_damaged_files_are_named(m, state, tmp_path):
    path = tmp_path / "state.safetensors"
    state.save(path)
    whole = path.read_bytes()
    for size in (0, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"state .*cannot be read"):
            GPNState.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        GPNState.load(tmp_path / "none")
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="is no GPN state"):
        GPNState.load(path)
    state.map(lambda t: t / 0 if t.is_floating_point() else t).save(path)
    with pytest.raises(UserError, match="has numbers that are not finite"):
        GPNState.load(path)
    for target, reason in ((tmp_path / "no" / "folder", "No such file"), (tmp_path, "Is a dir")):
        message = f"state {target} cannot be written: {reason}"
        with pytest.raises(UserError, match=message) as caught:
            state.save(target)
        assert "partial" not in str(caught.value)


def change(**values: object) -> Callable[[dict[str, torch.Tensor]], None]:
    """Put other tensors into a file, or leave some out (None)."""

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

    return apply


def long(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


DAMAGED_TENSORS = {
    "extra is no part of it": change(extra=torch.zeros(1)),
    "it has no predicted_BD": change(predicted_BD=None),
    "it has no memory_BHKV": change(memory_BHKV=None),
    "it has no tokens_seen": change(tokens_seen=None),
    r"predicted_BD has shape \(20,\), expected \(1, 20\)": change(predicted_BD=torch.zeros(20)),
    r"predicted_BD has shape \(1, 9\)": change(predicted_BD=torch.zeros(1, 9)),
    r"grounded_BD has shape \(1, 9\), expected \(1, 20\)": change(grounded_BD=torch.zeros(1, 9)),
    r"grounded_BD has shape \(2, 20\)": change(grounded_BD=torch.zeros(2, 20)),
    r"memory_BHKV has shape \(1, 5, 3, 7\), expected \(1, 3, 5, 7\)": change(
        memory_BHKV=torch.zeros(1, 5, 3, 7)
    ),
    r"tokens_seen has shape \(3,\), expected \(1,\)": change(tokens_seen=long(1, 2, 3)),
    r"text_hash_B has shape \(3,\)": change(text_hash_B=long(1, 2, 3)),
    "predicted_BD is torch.int32": change(predicted_BD=torch.zeros(1, 20, dtype=torch.int32)),
    "grounded_BD is torch.float16": change(grounded_BD=torch.zeros(1, 20, dtype=torch.float16)),
    "tokens_seen is torch.float32, expected torch.int64": change(tokens_seen=torch.zeros(1)),
    "tokens_seen counts below 0": change(tokens_seen=long(-4)),
    "grounded_BD has numbers that are not finite": change(
        grounded_BD=torch.full((1, 20), torch.inf)
    ),
}
DAMAGED_FACTS = [
    "{", "[]", "{}", "[" * 100_000, '{"state_size": 20}', '{"num_heads": 0}',
    '{"state_size": 20, "num_heads": 0, "depth": 3}', '{"state_size": "20", "num_heads": 0}',
    '{"state_size": 20, "num_heads": 3}', '{"state_size": 20, "num_heads": 0, "weights": 3}',
]  # fmt: skip


@pytest.fixture
def file(tiny, ids, tmp_path) -> Path:
    """One row of the float32 model with a memory, in a file that says so."""
    model = tiny(dtype=torch.float32)
    model(ids(1, 5)).state.save(tmp_path / "state", model=model)
    return tmp_path / "state"


def refused(file: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        GPNState.load(file)
    assert "\n" not in str(caught.value)
    assert f"state {file} is damaged: " in str(caught.value)


@pytest.mark.parametrize("message", DAMAGED_TENSORS)
def test_a_tensor_that_does_not_belong_is_named(file, message):
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    DAMAGED_TENSORS[message](tensors)
    save_file(tensors, file, metadata)
    refused(file, message)


@pytest.mark.parametrize("facts", DAMAGED_FACTS, ids=lambda text: text[:40])
def test_sizes_that_make_no_sense(file, facts):
    save_file(load_file(file), file, {"groundlm-state": facts})
    refused(file, "does not hold the sizes of a GPN state")


def test_sizes_of_a_file_are_held_against_its_tensors(file):
    facts = {"state_size": 21, "num_heads": 3, "head_k_dim": 5, "head_v_dim": 7}
    save_file(load_file(file), file, {"groundlm-state": json.dumps(facts)})
    refused(file, r"has shape \(1, 20\), expected \(1, 21\)")
    save_file(load_file(file), file, {"groundlm-state": '{"state_size": 20, "num_heads": 0}'})
    refused(file, "memory_BHKV is no part of it")


def test_everything_of_a_state_is_kept(m, ids, tmp_path):
    """Also what was read before the last `generate`, and tensors that share their numbers."""
    x = ids(2, 5)
    start = m(ids(2, 4)).state
    for new in (1, 3):
        g = m.generate(x[:, :0], state=start, max_new_tokens=new, return_dict_in_generate=True)
        g.cache.save(tmp_path / "state", model=m)
        assert g.cache.hash_before_B is not None
        assert_equal(GPNState.load(tmp_path / "state", m), g.cache)


def test_a_state_cannot_be_rewound(state):
    with pytest.raises(UserError, match="cannot be cut back"):
        state.crop(3)
