"""`groundlm eval`: what it reads, prints, writes and refuses."""

import itertools
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from passages import PASSAGES, write_passages

from groundlm.cli import main
from groundlm.data.tokenizer import load_tokenizer, tokenizer_sha256
from groundlm.data.windows import TokenSplit
from groundlm.evaluation import record, score
from groundlm.evaluation.text import TextEncoder
from groundlm.model.loading import load_model


@pytest.fixture
def run_eval(checkpoint, capsys):
    """Runs `groundlm eval` on the checkpoint; returns the JSON of the last line."""

    def run(*words: object) -> dict:
        capsys.readouterr()
        assert main(["eval", "--model", str(checkpoint), *map(str, words)]) == 0
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1])

    return run


@pytest.fixture
def refusal(checkpoint, capsys):
    """Runs `groundlm eval` on bad input; returns the one line on stderr."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main(["eval", "--model", str(checkpoint), *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    return run


def test_result_says_where_it_comes_from(run_eval, checkpoint, token_data, tmp_path, capsys):
    split = TokenSplit.open(token_data, "heldout")
    out = tmp_path / "new" / "result.json"
    result = run_eval("--data", token_data, "--window-tokens", 16, "--out", out)
    assert json.loads(out.read_text()) == result
    assert list(out.parent.iterdir()) == [out]
    assert result["model"] == str(checkpoint)
    assert (result["data"], result["split"]) == (str(token_data), "heldout")
    assert result["tokenizer_sha256"] == split.manifest.tokenizer.sha256
    assert result["prefix"] == "<|endoftext|> (id 0), once, before each text"
    assert result["state"] == "reset at windows, each read after the one token before it"
    assert (result["window_tokens"], result["stride_tokens"]) == (16, 16)
    assert (result["tokens"], result["documents"]) == (split.tokens, split.documents)
    assert (result["dtype"], result["model_type"]) == ("float32", "gpn")
    assert {"groundlm", "torch", "transformers"} <= set(result["versions"])
    assert result["commit"] == record.git_commit()
    model, stream = load_model(checkpoint), split.read(0, split.tokens)
    nats, tokens = score(model, stream, window=16, prefix=0)
    assert result["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    low, high = result["perplexity_interval"]
    assert low < result["perplexity"] < high
    curve = result["loss_by_context"]
    assert (curve[0]["from"], curve[-1]["to"]) == (1, 16)
    assert sum(band["tokens"] for band in curve) == tokens
    assert sum(band["tokens"] * band["nats"] for band in curve) == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--stride-tokens", 5),
        ("--state", "carry"),
        ("--whole-documents",),
        ("--reset-at-documents",),
    ],
)
def test_batch_size_does_not_change_a_score(run_eval, token_data, words):
    """C34, as the command prints it."""
    results = [
        run_eval("--data", token_data, "--window-tokens", 16, *words, "--batch-size", size)
        for size in (1, 8)
    ]
    for name in ("tokens", "window_tokens", "stride_tokens", "state"):
        assert results[0][name] == results[1][name]
    for name in ("nats_per_token", "bits_per_byte", "perplexity"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-6)
    policies = {"--state": "carried", "--whole-documents": "reset at documents"}
    assert results[0]["state"].startswith(policies.get(words[0] if words else "", "reset at win"))


EMOJI = "Smile 🙂🙃 or 👩‍👩‍👧 in <|endoftext|> é\r\n日本\n"


def test_text_file_is_scored_by_its_bytes(run_eval, checkpoint, tmp_path):
    """C37."""
    path = tmp_path / "emoji.txt"
    path.write_bytes(EMOJI.encode())
    result = run_eval("--text", path, "--window-tokens", 8)
    ids = TextEncoder(load_tokenizer(str(checkpoint))).encode(EMOJI)
    assert 0 not in ids
    nats, tokens = score(load_model(checkpoint), ids, window=8, prefix=0)
    assert tokens == result["tokens"] == len(ids)
    assert result["utf8_bytes"] == path.stat().st_size
    expected = nats / math.log(2) / path.stat().st_size
    assert result["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    assert result["perplexity_interval"] is None
    assert "unigram_bits_per_byte" not in result


def test_bits_per_byte_leaves_the_end_token_out(run_eval, checkpoint, token_data):
    split = TokenSplit.open(token_data, "heldout")
    result = run_eval("--data", token_data, "--window-tokens", 1)
    stream = [0, *split.read(0, split.tokens).tolist()]
    with torch.no_grad():
        table = load_model(checkpoint)(torch.arange(300)[:, None]).logits[:, 0].log_softmax(-1)
    nats = -sum(float(table[a, b]) for a, b in itertools.pairwise(stream) if b != 0)
    expected = nats / math.log(2) / split.utf8_bytes
    assert result["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def test_lambada_goes_to_the_run(run_eval, checkpoint, tmp_path):
    result = run_eval("--lambada", write_passages(tmp_path / "a.jsonl"))
    assert "tokens" not in result
    lambada = result["lambada"]
    items = checkpoint.parents[1] / "eval" / "step-000003.lambada.jsonl"
    assert lambada["items"] == str(items)
    rows = [json.loads(line) for line in items.read_text("utf-8").splitlines()]
    assert [row["target"] for row in rows[:2]] == ["memory", "state"]
    assert len(rows) == lambada["passages"] == len(PASSAGES)
    total = sum(row["log_likelihood"] for row in rows)
    assert math.log(lambada["lm_eval"]["perplexity"]) == pytest.approx(-total / len(rows))
    assert math.log(lambada["paper"]["perplexity"]) == pytest.approx(-total / lambada["subwords"])


def test_lambada_items_where_asked_or_beside_the_result(run_eval, token_data, tmp_path):
    passages, out = write_passages(tmp_path / "a.jsonl"), tmp_path / "r.json"
    result = run_eval("--data", token_data, "--lambada", passages, "--out", out)
    assert result["perplexity"] > 1
    assert result["lambada"]["items"] == str(tmp_path / "r.lambada.jsonl")
    run_eval("--lambada", passages, "--items-out", tmp_path / "i.jsonl", "--limit-tokens", 4)
    assert '"truncated": true' in (tmp_path / "i.jsonl").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_table_shows_both_protocols(checkpoint, token_data, tmp_path, capsys):
    words = ["eval", "--model", str(checkpoint), "--data", str(token_data), "--lambada"]
    assert main([*words, str(write_passages(tmp_path / "a.jsonl"))]) == 0
    out = capsys.readouterr().out
    for name in ("accuracy, paper", "accuracy, lm-eval", "95 % interval", "bits per byte, unigram"):
        assert name in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "{data}", "--window-tokens", 0), "--window-tokens is 0"),
        (("--data", "{data}", "--window-tokens", 8, "--stride-tokens", 9), "--stride-tokens is 9"),
        (("--data", "{data}", "--state", "kept"), "state"),
        (("--data", "{data}", "--text", "x"), "--data and --text are both given"),
        ((), "nothing to score"),
        (("--text", "nowhere.txt"), "text nowhere.txt cannot be read"),
        (("--text", "{empty}"), "is empty"),
        (("--text", "{binary}"), "is not UTF-8 at byte 2"),
        (("--lambada", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("--lambada", "{passages}", "--limit-tokens", 0), "--limit-tokens is 0"),
        (("--lambada", "no/where.TXT"), "LAMBADA file no/where.TXT does not exist"),
        (("--data", "{data}", "--limit-tokens", 4), "--limit-tokens is for LAMBADA"),
        (("--data", "{data}", "--items-out", "{empty}"), "--items-out is for LAMBADA"),
        (
            ("--lambada", "{passages}", "--out", "{empty}", "--items-out", "{empty}"),
            "name two files",
        ),
        (("--data", "{data}", "--out", "{data}"), "cannot be written"),
        (("--data", "{data}", "--out", "{empty}/a.json"), "cannot be written"),
        (("--data", "{data}", "--dtype", "int8"), "unknown dtype 'int8'"),
    ],
)
def test_bad_input_is_refused_in_one_line(refusal, token_data, tmp_path, words, message):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"ab\xff")
    names = {
        "data": token_data,
        "empty": tmp_path / "empty",
        "binary": tmp_path / "binary",
        "passages": write_passages(tmp_path / "p.jsonl"),
    }
    assert message in refusal(*(str(word).format(**names) for word in words))


@pytest.mark.parametrize(
    "progress",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"3",
        b'{"settings": null}',
        b'{"settings": {"data.window_tokens": "many"}}',
        b'{"settings": {"data.window_tokens": 0}}',
        b'{"settings": {"data.window_tokens": true}}',
        b'{"epoch": 3}',
    ],
)
def test_foreign_progress_file_says_nothing(run_eval, checkpoint, tmp_path, progress):
    (checkpoint / "training").mkdir()
    (checkpoint / "training" / "progress.json").write_bytes(progress)
    (tmp_path / "a.txt").write_text("the state")
    assert run_eval("--text", tmp_path / "a.txt")["window_tokens"] == 2048


def test_window_of_the_training_is_the_default(run_eval, checkpoint, tmp_path):
    (checkpoint / "training").mkdir()
    progress = {"settings": {"data.window_tokens": 24}}
    (checkpoint / "training" / "progress.json").write_text(json.dumps(progress))
    (tmp_path / "a.txt").write_text("the state")
    assert run_eval("--text", tmp_path / "a.txt")["window_tokens"] == 24


def test_averaged_weights_are_read_as_their_checkpoint(run_eval, checkpoint, tmp_path, token_data):
    training = checkpoint / "training"
    training.mkdir()
    settings = {"data.window_tokens": 16, "data.reset_at_documents": True}
    (training / "progress.json").write_text(json.dumps({"settings": settings}))
    ema = checkpoint / "ema"
    shutil.copytree(checkpoint, ema, ignore=shutil.ignore_patterns("training", "ema"))
    found = [run_eval("--model", folder, "--data", token_data) for folder in (checkpoint, ema)]
    for name in ("window_tokens", "state", "nats_per_token"):
        assert found[0][name] == found[1][name]
    assert found[1]["state"].startswith("reset at windows and at documents")


def test_a_split_is_never_read_whole(run_eval, token_data, monkeypatch):
    lengths, read = [], TokenSplit.read

    def spy(self: TokenSplit, start: int, length: int) -> np.ndarray:
        lengths.append(length)
        return read(self, start, length)

    monkeypatch.setattr(TokenSplit, "read", spy)
    monkeypatch.setattr("groundlm.data.windows.CHUNK_TOKENS", 128)
    for words in ((), ("--whole-documents",)):
        run_eval("--data", token_data, "--split", "train", "--window-tokens", 64, *words)
    assert sum(lengths) > 10_000
    assert max(lengths) == 128


def test_commit_is_that_of_the_checkout_that_tracks_the_package(monkeypatch):
    look_up = record.git_commit.__wrapped__
    commit = look_up()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)
    monkeypatch.setattr(record, "__file__", torch.__file__)  # inside, but not of, a checkout
    assert look_up() is None


def test_tokenizer_of_the_result_is_that_of_the_folder(run_eval, checkpoint, tmp_path):
    (tmp_path / "a.txt").write_text("the state")
    result = run_eval("--text", tmp_path / "a.txt")
    assert result["tokenizer_sha256"] == tokenizer_sha256(load_tokenizer(str(checkpoint)))


def test_model_with_too_small_a_vocabulary(tiny, checkpoint, refusal, token_data, tmp_path):
    tiny(vocab_size=200, dtype=torch.float32).save_pretrained(checkpoint)
    (tmp_path / "a.txt").write_text("the state reads the memory")
    assert "vocabulary of 300, the model of 200" in refusal("--data", token_data)
    assert "the model's vocabulary has 200" in refusal("--text", tmp_path / "a.txt")
    passages = write_passages(tmp_path / "a.jsonl")
    assert "the model's vocabulary has 200" in refusal("--lambada", passages)
