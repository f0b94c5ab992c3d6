"""LAMBADA's two protocols against brute force; prefix, truncation, where passages come from."""

import math

import numpy as np
import pytest
import torch
from passages import PASSAGES, answered_right, write_passages
from tokenizers import processors

from groundlm import UserError
from groundlm.data.tokenizer import load_tokenizer, train_tokenizer
from groundlm.evaluation import score_lambada
from groundlm.evaluation.continuations import score_continuations
from groundlm.evaluation.lambada import read_passages, split_last_word
from groundlm.evaluation.text import TextEncoder


@pytest.fixture
def tokenizer(token_data):
    return load_tokenizer(str(token_data / "tokenizer"))


def brute(model, context: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each target token, and whether it is the most likely one."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + target])).logits[0].double()
    scores = logits[len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(target)
    logprobs = scores.gather(1, wanted[:, None])[:, 0]
    return logprobs.numpy(), (scores.argmax(-1) == wanted).numpy()


def test_both_protocols_are_their_definitions(model, atol, tokenizer):
    """C33, by brute force."""
    items = [*PASSAGES, *answered_right(model, tokenizer)]
    encoder = TextEncoder(tokenizer)
    logprobs, tops = [], []
    for text in items:
        words = text.rstrip().split(" ")
        context, target = " ".join(words[:-1]), " " + words[-1]
        if context.endswith(" "):
            context, target = context.rstrip(), " " + target
        context_ids = encoder.encode(context)
        ids = encoder.encode(context + target)
        assert ids[: len(context_ids)] == context_ids
        one, top = brute(model, [tokenizer.eos_token_id, *context_ids], ids[len(context_ids) :])
        logprobs.append(one)
        tops.append(top)
    result = score_lambada(model, tokenizer, items, batch_size=4)
    assert {len(x) for x in logprobs} >= {1, 2, 3, 4}
    assert 0 < sum(t.all() for t in tops) < sum(t[0] for t in tops) < len(items)
    subwords = sum(map(len, logprobs))
    total = sum(x.sum() for x in logprobs)
    assert (result["passages"], result["subwords"]) == (len(items), subwords)
    assert result["paper"]["accuracy"] == sum(t[0] for t in tops) / len(items)
    assert result["lm_eval"]["accuracy"] == sum(t.all() for t in tops) / len(items)
    assert math.log(result["paper"]["perplexity"]) == pytest.approx(-total / subwords, abs=atol)
    assert math.log(result["lm_eval"]["perplexity"]) == pytest.approx(-total / len(items), abs=atol)
    for index, row in enumerate(result["items"]):
        assert row["index"] == index
        assert row["log_likelihood"] == pytest.approx(logprobs[index].sum(), abs=atol)
        assert (row["first_is_top"], row["all_are_top"]) == (tops[index][0], tops[index].all())
        assert not row["truncated"]
    one = score_lambada(model, tokenizer, items, batch_size=1)
    for a, b in zip(one["items"], result["items"], strict=True):
        assert a["log_likelihood"] == pytest.approx(b["log_likelihood"], abs=atol)


def test_context_ends_where_a_word_ends():
    assert split_last_word("a b c") == ("a b", " c")
    assert split_last_word("a b c \n") == ("a b", " c")
    assert split_last_word("word") == ("", " word")
    assert split_last_word("two  spaces") == ("two ", " spaces")
    with pytest.raises(UserError, match="passage 7 has no word"):
        split_last_word(" \n", 7)


def test_space_before_the_word_belongs_to_the_word(tokenizer):
    encoder = TextEncoder(tokenizer)
    context, word = encoder.encode_pair("two ", " spaces")
    assert context == [tokenizer.eos_token_id, *encoder.encode("two")]
    assert tokenizer.decode(word) == "  spaces"


def tokenizer_with_bos(adds_it: bool):
    """A tokenizer whose BOS is not its EOS, put in front by itself or not."""
    tokenizer = train_tokenizer(PASSAGES, 290)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    if adds_it:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def without_bos():
    tokenizer = train_tokenizer(PASSAGES, 290)
    tokenizer.bos_token = None
    return tokenizer


@pytest.mark.parametrize(
    "make", [lambda: tokenizer_with_bos(True), lambda: tokenizer_with_bos(False), without_bos]
)
def test_prefix_reaches_the_model_exactly_once(model, make):
    """C35."""
    tokenizer, counts = make(), []

    def count(module, arguments, named):
        ids = named["input_ids"]
        bos = -1 if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        prefix = tokenizer.eos_token_id
        counts.append(((ids == prefix).sum(1), (ids == bos).sum(1), ids[:, 0] == prefix))

    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    texts = [text for text in PASSAGES if "<" not in text]
    result = score_lambada(model, tokenizer, [*texts, "<s> <|endoftext|> end"], batch_size=1)
    handle.remove()
    assert len(counts) == len(texts) + 1
    assert all(once == 1 and bos == 0 and first for once, bos, first in counts)
    assert result["prefix"] == "<|endoftext|> (id 0), once, before each text"


def test_tokenizer_without_end_token_is_refused(model):
    tokenizer = train_tokenizer(PASSAGES, 290)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        score_lambada(model, tokenizer, PASSAGES)


def test_truncation_takes_from_the_left_and_is_counted(model, atol):
    """C36."""
    a, b, c, d, e, f = range(10, 16)
    cases = [  # pair, what is read before and what is scored, for a limit of 3; truncated
        (([a, b, c], [d, e]), [([b, c], [d, e])], True),
        (([a, b], [d, e]), [([a, b], [d, e])], False),  # all that is read fits
        (([a, b, c], [d]), [([a, b, c], [d])], False),
        (([a], [b, c, d, e, f]), [([a], [b, c, d]), ([c, d], [e, f])], True),
        (([a, b, c], [d, e, f]), [([c], [d, e, f])], True),
    ]
    pairs = [pair for pair, _, _ in cases]
    for batch_size in (1, 3):
        scored = score_continuations(model, pairs, batch_size, limit_tokens=3)
        for (_, blocks, truncated), result in zip(cases, scored, strict=True):
            expected = np.concatenate([brute(model, *block)[0] for block in blocks])
            np.testing.assert_allclose(-result.nats, expected, atol=atol)
            assert result.truncated == truncated
    free = score_continuations(model, pairs, 2)
    for (context, target), result in zip(pairs, free, strict=True):
        np.testing.assert_allclose(-result.nats, brute(model, context, target)[0], atol=atol)
        assert not result.truncated


def test_whole_run_with_and_without_a_limit(model, tokenizer):
    """C36, over a whole file."""
    free = score_lambada(model, tokenizer, PASSAGES)
    assert free["truncated"] == 0
    assert free["limit_tokens"] == (512 if model.config.model_type == "llama" else None)
    short = score_lambada(model, tokenizer, PASSAGES, limit_tokens=3)
    assert short["limit_tokens"] == 3
    differ = [
        a["index"]
        for a, b in zip(free["items"], short["items"], strict=True)
        if abs(a["log_likelihood"] - b["log_likelihood"]) > 1e-6
    ]
    cut = [row["index"] for row in short["items"] if row["truncated"]]
    assert short["truncated"] == len(cut) > 10
    assert set(differ) <= set(cut)
    assert len(differ) > 10


def test_nothing_to_score_is_refused(model, tokenizer):
    with pytest.raises(UserError, match="no LAMBADA passage"):
        score_lambada(model, tokenizer, [])
    with pytest.raises(UserError, match="context of item 0 has no tokens"):
        score_continuations(model, [([], [1])])
    with pytest.raises(UserError, match="continuation of item 0 has no tokens"):
        score_continuations(model, [([1], [])])
    with pytest.raises(UserError, match="limit is 0"):
        score_continuations(model, [([1], [1])], limit_tokens=0)


def test_passages_from_a_file(tmp_path):
    assert read_passages(str(write_passages(tmp_path / "a.jsonl"))) == PASSAGES
    odd = "one\u2028line"
    (tmp_path / "b.jsonl").write_text(f'{{"text": "{odd}"}}\n\n{{"text": "two"}}', "utf-8")
    assert read_passages(str(tmp_path / "b.jsonl")) == [odd, "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no passage"),
        (b'{"text": "a b"}\n{"txt": 1}\n', "line 2 is no JSON object"),
        (b'{"text": 3}\n', "line 1 is no JSON object"),
        (b"[1\n", "line 1 is no JSON object"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_hold_no_passages(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_passages(str(path))


def test_missing_file_and_names_that_are_none():
    for name in ("nowhere.jsonl", "some/where.jsonl", "a b"):
        with pytest.raises(UserError, match="does not exist"):
            read_passages(name)


def test_passages_from_the_hub(monkeypatch):
    import datasets

    asked = []

    def load(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_dict({"text": PASSAGES})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_passages("EleutherAI/lambada_openai") == PASSAGES
    assert asked == [("EleutherAI/lambada_openai", "test")]

    def fail(name, split):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"EleutherAI/lambada_openai cannot be loaded: no network"):
        read_passages("EleutherAI/lambada_openai")
