"""transformers' `generate` on a GPN, and going on from what it returned."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from groundlm import GPNState, UserError

V = 61
GREEDY = {
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_scores": True,
}


def assert_goes_on(later, whole, skipped):
    """`later` is the end of `whole`: tokens and, as tokens alone can agree by luck, scores."""
    count = len(later.scores)
    assert torch.equal(later.sequences[:, -count:], whole.sequences[:, -count:])
    for a, b in zip(later.scores, whole.scores[skipped:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_greedy_equals_a_plain_loop(m, ids):
    x = ids(2, 6)
    got = m.generate(x, max_new_tokens=8, **GREEDY).sequences
    expected = x
    for _ in range(8):
        expected = torch.cat([expected, m(expected).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(got, expected)
    assert torch.equal(m.generate(x, max_new_tokens=8, use_cache=False, **GREEDY).sequences, got)


@pytest.mark.parametrize("length", [6, 20])
def test_go_on_from_what_generate_returned(m, ids, length):
    x = ids(2, length)
    g = m.generate(x, max_new_tokens=5, **GREEDY)
    whole = m.generate(x, max_new_tokens=10, **GREEDY)
    again = m.generate(g.sequences, past_key_values=g.cache, max_new_tokens=5, **GREEDY)
    assert_goes_on(again, whole, 5)
    assert torch.equal(again.sequences, whole.sequences)
    # Only the new token: as `state`, or as `cache` with a mask that covers the old ones too.
    last = g.sequences[:, -1:]
    assert_goes_on(m.generate(last, state=g.cache, max_new_tokens=5, **GREEDY), whole, 5)
    mask = torch.ones_like(g.sequences)
    masked = m.generate(last, cache=g.cache, attention_mask=mask, max_new_tokens=5, **GREEDY)
    assert_goes_on(masked, whole, 5)
    # And on again from there.
    more = m.generate(x, max_new_tokens=13, **GREEDY)
    then = m.generate(masked.sequences, cache=masked.cache, max_new_tokens=3, **GREEDY)
    assert_goes_on(then, more, 10)


@pytest.mark.parametrize("new", [1, 4, 30])
def test_new_tokens_on_a_kept_state(m, ids, new):
    """Whether they are fewer or more than what the state has read."""
    prefix, x = ids(1, 9), ids(2, new)
    state = m(prefix).state
    whole = m.generate(torch.cat([prefix.expand(2, -1), x], 1), max_new_tokens=4, **GREEDY)
    assert_goes_on(m.generate(x, state=state, max_new_tokens=4, **GREEDY), whole, 0)
    for name in ("cache", "past_key_values"):
        kw = GREEDY | {"max_new_tokens": 4, name: state}
        long = torch.ones(2, 9 + new, dtype=torch.int64)
        assert_goes_on(m.generate(x, attention_mask=long, **kw), whole, 0)
        with pytest.raises(UserError, match="does not begin with what this cache has read"):
            m.generate(x, **kw)
    both = torch.cat([prefix.expand(2, -1), x], 1)
    assert_goes_on(m.generate(both, cache=state, max_new_tokens=4, **GREEDY), whole, 0)


def test_a_state_that_has_read_everything(m, ids):
    x = ids(2, 7)
    state = m(x).state
    whole = m.generate(x, max_new_tokens=4, **GREEDY)
    assert_goes_on(m.generate(x, cache=state, max_new_tokens=4, **GREEDY), whole, 0)
    embeddings = m.get_input_embeddings()
    for rows in (slice(0, 1), slice(0, 2)):
        alone = m.generate(x[rows], max_new_tokens=4, **GREEDY)
        nothing = x[rows, :0]
        kept = GREEDY | {"state": state.rows(rows)}
        for prompt in ({"inputs": nothing}, {"inputs_embeds": embeddings(nothing)}, {}):
            g = m.generate(**prompt, max_new_tokens=4, **kept)
            assert g.sequences.shape == (len(nothing), 4)
            assert_goes_on(g, alone, 0)
            assert m.generate(**prompt, max_length=4, **kept).sequences.shape[1] == 4
        # Nothing stands before the first token, also for what looks at the tokens so far.
        once = m.generate(nothing, max_new_tokens=4, repetition_penalty=9.0, **kept)
        torch.testing.assert_close(once.scores[0], alone.scores[0], rtol=0, atol=1e-5)
        assert_goes_on(m.generate(g.sequences, cache=g.cache, max_new_tokens=2, **GREEDY),
                       m.generate(x[rows], max_new_tokens=6, **GREEDY), 4)  # fmt: skip
        kept = GREEDY | {"past_key_values": state.rows(rows)}
        assert_goes_on(m.generate(max_new_tokens=4, **kept), alone, 0)


def test_left_padded_prompts(m, ids):
    a, b = ids(1, 5), ids(1, 9)
    both = torch.cat([F.pad(a, (4, 0)), b])
    mask = torch.ones_like(both)
    mask[0, :4] = 0
    g = m.generate(both, attention_mask=mask, max_new_tokens=5, **GREEDY)
    for i, prompt in enumerate((a, b)):
        alone = m.generate(prompt, max_new_tokens=10, **GREEDY)
        assert torch.equal(g.sequences[i, 9:], alone.sequences[0, prompt.shape[1] :][:5])
    whole = m.generate(both, attention_mask=mask, max_new_tokens=10, **GREEDY)
    # Going on without repeating the mask: transformers infers it from the pad id.
    assert_goes_on(m.generate(g.sequences, cache=g.cache, max_new_tokens=5, **GREEDY), whole, 5)
    long = F.pad(mask, (0, 5), value=1)
    again = m.generate(g.sequences, cache=g.cache, attention_mask=long, max_new_tokens=5, **GREEDY)
    assert_goes_on(again, whole, 5)


def test_rows_that_ended_early(m, ids):
    x = ids(3, 6)
    plain = m.generate(x, max_new_tokens=6, **GREEDY)
    eos = int(plain.sequences[0, 7])  # row 0 ends after two tokens, and goes on with pads
    ends = GREEDY | {"eos_token_id": eos}
    g = m.generate(x, max_new_tokens=5, **ends)
    assert (g.sequences[0, 8:] == 0).all()
    later = m.generate(g.sequences, cache=g.cache, max_new_tokens=1, **GREEDY)
    mask = torch.ones_like(g.sequences)  # row 0 too goes on, from the pads that it has read
    ones = GREEDY | {"attention_mask": mask, "max_new_tokens": 2}
    assert_goes_on(
        m.generate(g.sequences, cache=g.cache, **ones), m.generate(g.sequences, **ones), 0
    )
    for i in (1, 2):
        if eos not in g.sequences[i, 6:]:
            assert torch.equal(later.sequences[i], plain.sequences[i])
    assert g.cache.get_seq_length() == 10


def test_beams_and_several_sequences(m, ids):
    x = ids(2, 6)
    kw = {"pad_token_id": 0, "max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2}
    cached = m.generate(x, **kw)
    assert cached.shape == (4, 11)
    assert torch.equal(cached, m.generate(x, use_cache=False, **kw))
    state = m(x[:, :4]).state
    assert torch.equal(cached[:, 4:], m.generate(x[:, 4:], state=state, **kw))
    assert torch.equal(cached, m.generate(x, cache=state, **kw))
    several = m.generate(x, do_sample=True, num_return_sequences=3, max_new_tokens=4, top_k=0)
    assert several.shape == (6, 10)
    assert len({tuple(row) for row in several.tolist()}) > 2


def test_going_on_from_beams_is_right_or_refused(m, ids):
    x = ids(2, 6)
    kw = {"num_beams": 3, "max_new_tokens": 6} | GREEDY
    one = m.generate(x, **kw)
    with pytest.raises(UserError, match="the state has 6 rows, the input has 2"):
        m.generate(one.sequences, cache=one.cache, max_new_tokens=3, **GREEDY)
    all_of_them = m.generate(x, num_return_sequences=3, **kw)
    best = all_of_them.cache  # of the beams as they stand, which are not the sequences returned
    with pytest.raises(UserError, match="does not begin with what this cache has read"):
        m.generate(all_of_them.sequences, cache=best, max_new_tokens=3, **GREEDY)
    kept = m(all_of_them.sequences[:, :-1]).state
    later = m.generate(all_of_them.sequences, cache=kept, max_new_tokens=3, **GREEDY)
    assert_goes_on(later, m.generate(all_of_them.sequences, max_new_tokens=3, **GREEDY), 0)


def test_a_cache_of_other_sequences_is_refused(m, ids):
    x = ids(2, 6)
    g = m.generate(x, max_new_tokens=3, **GREEDY)
    edited = g.sequences.clone()
    edited[1, 0] = edited[1, 0] % (V - 1) + 1
    for sequences, cache in (
        (g.sequences, g.cache.rows([1, 0])),
        (edited, g.cache),
        (g.sequences[:, 1:], g.cache),
        (g.sequences[:, :5], g.cache),
    ):
        for name in ("cache", "past_key_values"):
            with pytest.raises(UserError, match="does not begin with what this cache has read"):
                m.generate(sequences, max_new_tokens=2, **{name: cache}, **GREEDY)


def test_a_cache_goes_on_after_a_file(m, ids, tmp_path):
    """Also where it was itself given a state, so that the sequences are not all it has read."""
    first = m.generate(ids(2, 6), max_new_tokens=3, **GREEDY)
    second = m.generate(ids(2, 3), state=first.cache, max_new_tokens=3, **GREEDY)
    for g in (first, second):
        g.cache.save(tmp_path / "state", model=m)
        kept = GPNState.load(tmp_path / "state", m)
        later = m.generate(g.sequences, cache=kept, max_new_tokens=4, **GREEDY)
        assert_goes_on(later, m.generate(g.sequences, cache=g.cache, max_new_tokens=4, **GREEDY), 0)


def test_the_pad_id_of_a_generation_config(tiny, ids):
    """Given there alone it still says which columns of the sequences are padding."""
    m = tiny()
    prompts = torch.cat([F.pad(ids(1, 3), (3, 0)), ids(1, 6)])
    mask = (prompts != 0).long()
    names = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    names["suppress_tokens"] = [0]  # transformers takes any 0 for padding
    config = GenerationConfig(**names, max_new_tokens=3)
    g = m.generate(prompts, attention_mask=mask, generation_config=config)
    later = m.generate(g.sequences, cache=g.cache, generation_config=config)
    whole = m.generate(prompts, attention_mask=mask, max_new_tokens=6, **names)
    assert torch.equal(later.sequences, whole.sequences)
    assert torch.equal(later.cache.tokens_seen, whole.cache.tokens_seen)


def test_sampling_is_deterministic_for_a_seed(m, ids):
    x = ids(2, 4)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(m.generate(x, do_sample=True, max_new_tokens=12, top_k=0))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_inputs_embeds(m, ids):
    x = ids(2, 6)
    embedded = m.get_input_embeddings()(x)
    whole = m.generate(x, max_new_tokens=9, **GREEDY)
    g = m.generate(inputs_embeds=embedded, max_new_tokens=5, **GREEDY)
    assert torch.equal(g.sequences, whole.sequences[:, 6:11])
    assert_goes_on(m.generate(g.sequences, cache=g.cache, max_new_tokens=4, **GREEDY), whole, 5)
    state = m(x[:, :2]).state
    later = m.generate(inputs_embeds=embedded[:, 2:], state=state, max_new_tokens=5, **GREEDY)
    assert_goes_on(later, g, 0)
    with pytest.raises(UserError, match="give the cache as state="):
        m.generate(inputs_embeds=embedded, cache=state, max_new_tokens=5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_prompt_goes_on_from_its_last_document(m, ids, use_cache):
    a, b = ids(1, 5), ids(1, 7)
    whole = m.generate(b, max_new_tokens=4, **GREEDY)
    packed = torch.cat([a, b], 1)
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    kw = GREEDY | {"use_cache": use_cache, "max_new_tokens": 4}
    assert_goes_on(m.generate(packed, resets=places == 0, **kw), whole, 0)
    assert_goes_on(m.generate(packed, cu_seqlens=torch.tensor([0, 5, 12]), **kw), whole, 0)


@pytest.mark.parametrize("chunk", range(1, 13))
def test_packed_prompt_in_chunks(m, ids, chunk):
    packed, start = ids(2, 12), m(ids(2, 4)).state
    resets = torch.zeros(2, 12, dtype=torch.bool)
    resets[0, 5] = resets[1, 8] = True
    kw = GREEDY | {"max_new_tokens": 3}
    for name, form in (("resets", {"resets": resets}), ("cu_seqlens", None)):
        for state in (None, start):
            x = packed
            if name == "cu_seqlens":
                x, form = packed[:1], {"cu_seqlens": torch.tensor([0, 5, 7, 12])}
                state = None if state is None else state.rows(0)
            whole = m.generate(x, state=state, **form, **kw)
            later = m.generate(x, state=state, prefill_chunk_size=chunk, **form, **kw)
            assert_goes_on(later, whole, 0)
            assert torch.equal(later.cache.tokens_seen, whole.cache.tokens_seen)
            if chunk == 1:
                last = x[0, 7 if name == "cu_seqlens" else 5 :][None]
                alone = m.generate(last, **kw)
                assert torch.equal(whole.sequences[0, 12:], alone.sequences[0, last.shape[1] :])


def test_prompt_in_chunks(m, ids):
    x = ids(2, 11)
    whole = m.generate(x, max_new_tokens=4, **GREEDY)
    assert_goes_on(m.generate(x, prefill_chunk_size=4, max_new_tokens=4, **GREEDY), whole, 0)
    g = m.generate(x, max_new_tokens=2, **GREEDY)
    kw = GREEDY | {"prefill_chunk_size": 2, "max_new_tokens": 2}
    assert_goes_on(m.generate(g.sequences, cache=g.cache, **kw), whole, 2)


def test_the_decoder_runs_for_the_last_position_only(m, ids, monkeypatch):
    widths = []
    plain = m.model.decoder_hidden
    monkeypatch.setattr(
        m.model, "decoder_hidden", lambda p: (widths.append(p.shape[1]), plain(p))[1]
    )
    m.generate(ids(1, 30), max_new_tokens=3, **GREEDY)
    assert widths == [1, 1, 1]


def test_what_a_state_cannot_do_is_refused(m, ids, tiny):
    x, state = ids(1, 4), m.model.zero_state(1)
    with pytest.raises(UserError, match="cannot be rewound"):
        m.generate(x, assistant_model=tiny(), max_new_tokens=3)
    with pytest.raises(UserError, match="cannot be rewound"):
        m.generate(x, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(UserError, match="use_cache=False cannot go on"):
        m.generate(x, state=state, use_cache=False, max_new_tokens=3)
    with pytest.raises(UserError, match="input_ids has shape"):
        m.generate(x[:, :0], max_new_tokens=3)
    with pytest.raises(UserError, match="the state has 3 rows"):
        m.generate(x, state=state.repeat(3), max_new_tokens=3)
    with pytest.raises(UserError, match="no attentions"):
        m.generate(x, output_attentions=True, return_dict_in_generate=True, max_new_tokens=3)
    read = m(x).state
    read.text_hash_B = None
    with pytest.raises(UserError, match="give it as state="):
        m.generate(x, cache=read, max_new_tokens=3)
