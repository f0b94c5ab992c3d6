"""The state as an object: rows, files, and what it refuses."""

import pytest
import torch
from safetensors.torch import save_file

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
    [(4, "row 4 is not there: the state has 4 rows"), ([-5], "row -5"), ([True], "1 booleans")],
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
    state.save(path, config=m.config)
    assert_equal(GPNState.load(path, m.config), state)
    first_bytes = path.read_bytes()
    state.save(path, config=m.config)
    assert path.read_bytes() == first_bytes
    whole = path.stat().st_size
    state.save(path, rows=[2, 0], config=m.config)
    assert_equal(GPNState.load(path, m.config), state.rows([2, 0]))
    assert path.stat().st_size < 0.75 * whole
    state.rows(1).save(path)  # without the model's configuration: the state's own sizes
    assert_equal(GPNState.load(path), state.rows(1))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("size", [{"state_size": 21}, {"vocab_size": 62}, {"ffn_size": 24}])
def test_a_state_of_another_model_is_refused(m, state, tiny, tmp_path, size):
    path = tmp_path / "state.safetensors"
    state.save(path, config=m.config)
    other = tiny(**{"num_heads": m.config.num_heads, "num_layers": m.config.num_layers} | size)
    name, value = next(iter(size.items()))
    have = getattr(m.config, name)
    message = f"state .* is of another model: its {name} is {have}, this model has {value}"
    with pytest.raises(UserError, match=message) as caught:
        GPNState.load(path, other.config)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(UserError, match="cannot be written"):
        state.save(tmp_path / "no" / "folder")


def test_a_state_cannot_be_rewound(state):
    with pytest.raises(UserError, match="cannot be cut back"):
        state.crop(3)
