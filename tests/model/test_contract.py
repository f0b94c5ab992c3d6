"""What a caller may expect of forward and backward, in float64 at 1e-9."""

import pytest
import torch
import torch.nn.functional as F

from groundlm import GPNState, UserError
from groundlm.model import cell, products

V = 61
CLOSE = {"rtol": 0, "atol": 1e-9}


def assert_same_state(a: GPNState, b: GPNState) -> None:
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        torch.testing.assert_close(tensor, b.tensors()[name], **CLOSE, msg=lambda t, n=name: n + t)


def gradients(m):
    return {k: p.grad.clone() for k, p in m.named_parameters()}


def assert_same_gradients(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **CLOSE, msg=lambda t, n=name: n + t)


def test_left_padded_pair(m, ids):
    prompts = [ids(1, 5), ids(1, 9)]
    both = torch.cat([F.pad(prompts[0], (4, 0)), prompts[1]])
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    out = m(both, attention_mask=mask)
    for i in (0, 1):
        alone = m(prompts[i])
        torch.testing.assert_close(out.logits[i, -1], alone.logits[0, -1], **CLOSE)
        assert_same_state(out.state.rows(i), alone.state)
    both[0, 6] = 0  # a real token that equals the pad id is read
    changed = m(both, attention_mask=mask).logits[0, -1]
    assert (changed - out.logits[0, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("time", [1, 2, 3, 15, 16, 17, 63, 64, 65])
def test_window_equals_steps(m, ids, time):
    x = ids(2, time)
    whole, state, parts = m(x, use_cache=True), None, []
    for t in range(time):
        out = m(x[:, t : t + 1], past_key_values=state, use_cache=True)
        state = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **CLOSE)
    assert_same_state(state, whole.state)
    assert state.get_seq_length() == whole.state.get_seq_length() == time


@pytest.mark.parametrize("cuts", [[1, 69], [33, 37], [5, 30, 35]])
def test_several_tokens_on_top_of_a_state(m, ids, cuts):
    x, state, parts, i = ids(2, 70), None, [], 0
    for n in cuts:
        out = m(x[:, i : i + n], cache=state)
        state, i = out.cache, i + n
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), m(x).logits, **CLOSE)


@pytest.mark.parametrize("time", [7, 20])
def test_right_padding_leaves_the_state_alone(m, ids, time):
    x, y = ids(1, time), ids(1, 1)
    a = m(x)
    b = m(F.pad(x, (0, 5)), attention_mask=F.pad(torch.ones_like(x), (0, 5)))
    torch.testing.assert_close(a.logits[0, -1], b.logits[0, time - 1], **CLOSE)
    assert_same_state(a.state, b.state)
    torch.testing.assert_close(m(y, state=a.state).logits, m(y, state=b.state).logits, **CLOSE)
    # One step that is padding for one row only.
    state = m(ids(2, 4)).state
    after = m(ids(2, 1), state=state, attention_mask=torch.tensor([[0], [1]])).state
    assert_same_state(after.rows(0), state.rows(0))
    assert after.tokens_seen.tolist() == [4, 5]


def test_nothing_is_remembered_between_calls(m, ids):
    x = ids(2, 9)
    before = m(x).logits
    m(ids(5, 3))
    assert torch.equal(before, m(x).logits)
    m.train()
    for _ in range(2):
        m(x, labels=x).loss.backward()


@pytest.mark.parametrize("time", [9, 20])
def test_rows_do_not_influence_each_other(m, ids, time):
    x = ids(5, time)
    out = m(x).logits
    for i in range(5):
        torch.testing.assert_close(out[i], m(x[i : i + 1]).logits[0], **CLOSE)
    embedded = m.get_input_embeddings()(x).detach().clone()
    embedded[1] = float("nan")
    torch.testing.assert_close(m(inputs_embeds=embedded).logits[[0, 2, 3, 4]], out[[0, 2, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_alone_and_in_a_batch(m, ids, dtype):
    """Also the precision that people use; greedy tokens are those of the row alone."""
    m.to(dtype)
    x = ids(7, 20)
    out = m(x).logits
    close = CLOSE if dtype == torch.float64 else {"rtol": 0, "atol": 1e-5}
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    together = m.generate(x, **greedy)
    assert len({tuple(row) for row in together[:, 20:].tolist()}) > 1
    for i in range(7):
        torch.testing.assert_close(out[i], m(x[i : i + 1]).logits[0], **close)
        assert torch.equal(together[i], m.generate(x[i : i + 1], **greedy)[0])


@pytest.mark.parametrize("time", [6, 20])
def test_masked_embeddings_reach_no_gradient(m, ids, time):
    x = ids(2, time)
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    clean = m.get_input_embeddings()(x).detach()
    ends = []
    for filler in (0.0, float("nan")):
        m.zero_grad()
        embedded = clean.clone()
        embedded[0, :3] = filler
        embedded.requires_grad_()
        logits = m(inputs_embeds=embedded, attention_mask=mask).logits
        logits[:, -1].square().sum().backward()
        grads = {k: p.grad.clone() for k, p in m.named_parameters() if p.grad is not None}
        ends.append(grads | {"inputs_embeds": embedded.grad, "logits": logits[:, -1].detach()})
    assert_same_gradients(*ends)


def test_large_products_follow_autocast(monkeypatch):
    """With and without gradients alike, whatever library the processor prefers."""
    monkeypatch.setattr(products, "prefers_onednn", products.has_mkldnn)
    torch.manual_seed(0)
    weight, x = torch.randn(1100, 1100), torch.randn(3, 1100)
    assert weight.numel() >= cell.LARGE_WEIGHT
    plain = x.bfloat16() @ weight.bfloat16().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            assert torch.equal(cell.linear(x, weight), plain.float())
        assert torch.equal(cell.linear(x, weight), plain.float())


@pytest.mark.parametrize("lengths", [(7, 9), (20, 25)])
def test_packed_documents_do_not_leak(m, ids, lengths):
    first, second = lengths
    a, b = ids(1, first), ids(1, second)
    packed, total = torch.cat([a, b], 1), first + second
    bounds = torch.tensor([0, first, first, total])  # with an empty document
    places = torch.cat([torch.arange(first), torch.arange(second)])[None]
    alone = m(b)
    forms = {
        "cu_seqlens": bounds,
        "position_ids": places,
        "resets": places == 0,
    }
    for name, value in forms.items():
        out = m(packed, **{name: value})
        torch.testing.assert_close(out.logits[:, first:], alone.logits, **CLOSE)
        assert_same_state(out.state, alone.state)
        other = m(torch.cat([a % (V - 1) + 1, b], 1), **{name: value})
        assert torch.equal(out.logits[:, first:], other.logits[:, first:])
        e = m.get_input_embeddings()(packed).detach().requires_grad_()
        m(inputs_embeds=e, **{name: value}).logits[:, first:].sum().backward()
        assert e.grad[:, :first].abs().max() == 0
        assert e.grad[:, first:].abs().max() > 0
    assert not torch.allclose(m(packed).logits[:, first:], alone.logits)  # off: one document


def test_tokens_past_the_last_bound_are_not_read(m, ids):
    x = ids(1, 12)
    out = m(x, cu_seqlens=torch.tensor([0, 4, 9]))
    assert_same_state(out.state, m(x[:, 4:9]).state)
    # The first document goes on from a state, the second does not see it.
    state = m(ids(1, 5)).state
    out = m(x, cu_seqlens=torch.tensor([0, 4, 12]), state=state)
    torch.testing.assert_close(out.logits[:, :4], m(x[:, :4], state=state).logits, **CLOSE)
    torch.testing.assert_close(out.logits[:, 4:], m(x[:, 4:]).logits, **CLOSE)


@pytest.mark.parametrize("cuts", [[9, 11], [1, 19], [3, 16, 1]])
def test_gradient_through_a_handed_on_state(m, ids, cuts):
    x = ids(2, 20)

    def run(cuts, detach=False):
        m.zero_grad()
        state, i, total = None, 0, 0.0
        for n in cuts:
            out = m(x[:, i : i + n], state=state)
            state, i = (out.state.detach() if detach else out.state), i + n
            total = total + (out.logits**2).mean() * n
        total.backward()
        return gradients(m)

    whole = run([20])
    assert_same_gradients(whole, run(cuts))
    cut = run(cuts, detach=True)  # truncated: another gradient
    assert any(not torch.allclose(whole[k], cut[k], atol=1e-9) for k in whole)


def test_gradient_of_the_start_state(m, ids):
    x = ids(2, 3)
    state = m(ids(1, 4)).state.detach()
    names = ["predicted_BD"]
    if state.memory_BHKV is not None:  # without memory nothing reads the last grounded state
        names += ["grounded_BD", "memory_BHKV"]
    leaves = [state.tensors()[name].requires_grad_() for name in names]
    shared = torch.autograd.grad(m(x, state=state).logits.square().sum(), leaves)
    alone = [
        torch.autograd.grad(m(x[i : i + 1], state=state).logits.square().sum(), leaves)
        for i in (0, 1)
    ]
    for both, first, second in zip(shared, *alone, strict=True):
        assert both.abs().max() > 0
        torch.testing.assert_close(both, first + second, **CLOSE)


def test_accumulation_equals_the_unsplit_batch(m, ids):
    x = ids(8, 12)
    y = x.clone()
    for i in range(8):
        y[i, : i + 2] = -100
    count = (y[:, 1:] != -100).sum()
    m.zero_grad()
    loss = m(x, labels=y).loss
    loss.backward()
    whole = gradients(m)
    m.zero_grad()
    parts = [
        m(x[j : j + 2], labels=y[j : j + 2], num_items_in_batch=count).loss for j in (0, 2, 4, 6)
    ]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), loss, **CLOSE)
    assert_same_gradients(whole, gradients(m))


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0), torch.tensor(0.0)])
def test_no_targets_at_all(m, ids, count):
    x = ids(2, 9)
    loss = m(x, labels=torch.full_like(x, -100), num_items_in_batch=count).loss
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in m.parameters())


def test_zero_vectors_and_all_pad_rows(m, ids):
    m.get_input_embeddings().weight.data[5] = 0
    embedded = m.get_input_embeddings()(torch.full((1, 9), 5)).detach().requires_grad_()
    x = ids(2, 9)
    mask = torch.ones_like(x)
    mask[0] = 0
    m(x, labels=x, attention_mask=mask).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in m.parameters())
    predicted = m.model(inputs_embeds=embedded).last_hidden_state
    predicted.sum().backward()
    assert (predicted == 0).all()
    # One norm at zero has slope 1 / sqrt(eps) = 1e3; F.normalize would give 1e12.
    assert torch.isfinite(embedded.grad).all()
    assert embedded.grad.abs().max() < 1e4


def test_shift_and_shortest_sequences(m, ids):
    x = ids(2, 9)
    out = m(x, labels=x)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected, **CLOSE)
    m.train()
    for time in (1, 2, 3, 33):
        y = ids(2, time)
        loss = m(y, labels=y).loss
        loss.backward()
        assert torch.isfinite(loss)
    with pytest.raises(UserError, match=r"input_ids has shape \(2, 0\)"):
        m(ids(2, 0))


@pytest.mark.parametrize("time", [1, 9, 20, 260])  # segments of 17 tokens go through fused
def test_gradients_do_not_depend_on_mode_cache_or_recompute(m, ids, time):
    x = ids(2, max(time, 2))
    state = m(ids(2, 3)).state.detach()

    def run(**kwargs):
        m.zero_grad()
        m(x, labels=x, state=state, **kwargs).loss.backward()
        return gradients(m)

    plain = run(use_cache=False)
    assert_same_gradients(plain, run(use_cache=True))
    m.activation_checkpointing_enable()
    assert m.model.gradient_checkpointing
    assert_same_gradients(plain, run())
    m.train()
    assert_same_gradients(plain, run())
    resets = torch.zeros_like(x, dtype=torch.bool)
    resets[:, 1] = True
    packed = run(resets=resets)
    m.activation_checkpointing_disable()
    assert_same_gradients(packed, run(resets=resets))
    assert_same_gradients(plain, run())


def test_logits_to_keep(m, ids):
    x = ids(2, 9)
    full = m(x).logits
    torch.testing.assert_close(m(x, logits_to_keep=1).logits, full[:, -1:], **CLOSE)
    torch.testing.assert_close(m(x, logits_to_keep=4).logits, full[:, -4:], **CLOSE)
    places = torch.tensor([0, 5])
    torch.testing.assert_close(m(x, logits_to_keep=places).logits, full[:, places], **CLOSE)


def test_bf16_weights_keep_a_float32_state(tiny, kind, ids):
    exact = tiny(**kind)
    half = tiny(dtype=torch.bfloat16, **kind)
    x = ids(1, 40)
    out = half(x, labels=x)
    dtypes = {t.dtype for t in out.state.tensors().values()}
    assert dtypes == {torch.float32, torch.int64}
    torch.testing.assert_close(out.loss.double(), exact(x, labels=x).loss, rtol=5e-2, atol=0)
    state = None
    for t in range(40):
        state = half(x[:, t : t + 1], state=state).state
    drift = (state.predicted_BD - out.state.predicted_BD).norm() / out.state.predicted_BD.norm()
    assert drift < 2e-2


def test_compiled_step(m, ids):
    """More steps than torch recompiles; a number that it held fast would raise, not slow down."""
    torch._dynamo.reset()
    step = torch.compile(m, backend="eager", fullgraph=True, dynamic=False)
    steps = torch._dynamo.config.recompile_limit + 4
    x, state = ids(2, 2 + steps), None
    with torch.no_grad():
        state = m(x[:, :2]).state
        for t in range(2, 2 + steps):
            out = step(input_ids=x[:, t : t + 1], state=state, use_cache=True)
            state = out.state
        whole = m(x)
    torch.testing.assert_close(out.logits[:, -1], whole.logits[:, -1], **CLOSE)
    assert_same_state(state, whole.state)


BAD_CALLS = {
    "token id 61 is outside the vocabulary of 61": lambda m, x: m(x.clone().fill_(61)),
    "token id -3 is outside": lambda m, x: m(x.clone().fill_(-3)),
    "input_ids is torch.float32, expected whole numbers": lambda m, x: m(x.float()),
    "input_ids is torch.bool": lambda m, x: m(x > 3),
    "input_ids is torch.int8": lambda m, x: m(x.to(torch.int8)),
    "exactly one of input_ids": lambda m, x: m(),
    r"input_ids has shape \(9,\)": lambda m, x: m(x[0]),
    r"input_ids has shape \(0, 9\)": lambda m, x: m(x[:0]),
    r"inputs_embeds has shape \(2, 0, 11\)": lambda m, x: m(inputs_embeds=torch.zeros(2, 0, 11)),
    r"inputs_embeds has shape \(2, 9, 7\)": lambda m, x: m(inputs_embeds=torch.zeros(2, 9, 7)),
    r"attention_mask has shape \(2, 4\)": lambda m, x: m(x, attention_mask=x[:, :4]),
    r"attention_mask has shape \(1, 9\)": lambda m, x: m(x, attention_mask=x[:1]),
    "the state has 3 rows, the input has 2": lambda m, x: m(x, state=m.model.zero_state(3)),
    "name one thing": lambda m, x: m(x, state=m.model.zero_state(2), cache=m.model.zero_state(2)),
    r"unknown argument 'reset' \(did you mean resets": lambda m, x: m(x, reset=x),
    "seq_idx is given without": lambda m, x: m(x, seq_idx=x),
    r"cu_seqlens \[0, 5, 12\]": lambda m, x: m(x[:1], cu_seqlens=torch.tensor([0, 5, 12])),
    "not of 2 rows": lambda m, x: m(x, cu_seqlens=torch.tensor([0, 9])),
    r"resets has shape \(2, 3\)": lambda m, x: m(x, resets=x[:, :3] > 0),
    "give one of resets": lambda m, x: m(x, resets=x > 0, position_ids=x),
    r"labels have shape \(2, 3\)": lambda m, x: m(x, labels=x[:, :3]),
    "label 61 is outside the vocabulary of 61": lambda m, x: m(x, labels=x.clone().fill_(61)),
    "label -5 is outside": lambda m, x: m(x, labels=x.clone().fill_(-5)),
    "labels is torch.float64, expected": lambda m, x: m(x, labels=x.double()),
    "logits_to_keep holds position 9, there are 9": lambda m, x: m(
        x, logits_to_keep=torch.tensor([2, 9])
    ),
    "logits_to_keep is -1": lambda m, x: m(x, logits_to_keep=-1),
    "cu_seqlens is a list": lambda m, x: m(x[:1], cu_seqlens=[0, 9]),
    r"cu_seqlens is torch.int64 of shape \(1, 2\)": lambda m, x: m(
        x[:1], cu_seqlens=torch.tensor([[0, 9]])
    ),
    "resets is a list": lambda m, x: m(x, resets=[[True] * 9] * 2),
    "goes on from a GPNState": lambda m, x: m(x, past_key_values=(x,)),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_input_is_named_in_one_line(tiny, ids, message):
    with pytest.raises(UserError, match=message) as caught:
        BAD_CALLS[message](tiny(), ids(2, 9))
    assert "\n" not in str(caught.value)


def test_tuple_output(m, ids):
    logits, state = m(ids(1, 3), return_dict=False)
    assert logits.shape == (1, 3, V)
    assert isinstance(state, GPNState)
