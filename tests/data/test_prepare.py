import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from groundlm.data import pipeline
from groundlm.data import prepare as prepare_module
from groundlm.data.integrity import VERIFIED_NAME
from groundlm.data.manifest import Manifest
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.data.steps import is_heldout
from groundlm.data.tokenizer import load_tokenizer, tokenizer_sha256
from groundlm.data.windows import TokenSplit, TrainingWindows
from groundlm.errors import UserError
from helpers import ONE_THREAD

Contents = Callable[[str | Path], dict[str, bytes]]


def decoded(out: str, split: str) -> list[str]:
    """The documents of a split in stored order, each checked to end in its only EOS."""
    data = TokenSplit.open(out, split)
    tokenizer = AutoTokenizer.from_pretrained(str(Path(out, "tokenizer")))
    texts, start = [], 0
    for end in data.document_ends.tolist():
        ids = data.read(start, end - start)
        assert (ids == data.eos_token_id).sum() == 1
        assert ids[-1] == data.eos_token_id
        texts.append(tokenizer.decode(ids[:-1]))
        start = end
    assert start == data.tokens
    return texts


def refused(config: PrepareConfig) -> str:
    """The one line that `prepare` refuses with, leaving nothing behind."""
    with pytest.raises(UserError) as caught:
        prepare(config)
    assert "\n" not in str(caught.value)
    assert not Path(f"{config.out}.partial").exists()
    return str(caught.value)


def text_config(config: PrepareConfig, tmp_path: Path, content: str) -> PrepareConfig:
    """The config with one JSONL file of this content as input, and no held-out split."""
    path = tmp_path / "one.jsonl"
    path.write_text(content, "utf-8")
    return replace(config, input=[str(path)], heldout_share=0)


def test_round_trip_and_counts(config: PrepareConfig, texts: list[str]) -> None:
    manifest = prepare(config)
    sides = {split: decoded(config.out, split) for split in ("train", "heldout")}
    assert sorted(sides["train"] + sides["heldout"]) == sorted(texts)
    assert set(sides["train"]).isdisjoint(sides["heldout"])
    for split, stored in sides.items():
        expected = [text for text in texts if is_heldout(text, 1, 0.2) == (split == "heldout")]
        assert sorted(stored) == sorted(expected)
        assert stored != expected, "not shuffled"
        info = manifest.splits[split]
        assert info.documents == len(stored)
        assert info.utf8_bytes == sum(len(text.encode()) for text in stored)
        assert info.tokens == sum(file.tokens for file in info.files)
        assert [file.size_bytes for file in info.files] == [2 * file.tokens for file in info.files]
    assert 30 < len(sides["heldout"]) < 90
    assert sorted(os.listdir(config.out)) == ["heldout", "manifest.json", "tokenizer", "train"]
    files = ["000_train.ds", "000_train.ds.index"]
    assert sorted(os.listdir(Path(config.out, "train"))) == [VERIFIED_NAME, *files]
    assert Manifest.load(config.out) == manifest
    tokenizer = load_tokenizer(str(Path(config.out, "tokenizer")))
    assert tokenizer_sha256(tokenizer) == manifest.tokenizer.sha256
    assert manifest.vocab_size == 300
    assert manifest.dtype == "uint16"


def test_shuffle_mixes_the_files(config: PrepareConfig, texts: list[str]) -> None:
    prepare(replace(config, heldout_share=0))
    origin = [texts.index(text) % 3 for text in decoded(config.out, "train")]
    runs = 1 + np.count_nonzero(np.diff(origin))
    assert runs > len(texts) / 2


def test_seed_moves_documents(config: PrepareConfig) -> None:
    prepare(config)
    prepare(replace(config, seed=2, out=config.out + "2"))
    assert set(decoded(config.out, "heldout")) != set(decoded(config.out + "2", "heldout"))


def test_same_bytes_for_one_and_two_workers(config: PrepareConfig, contents: Contents) -> None:
    prepare(config)
    prepare(replace(config, out=config.out + "2", workers=2))
    assert contents(config.out) == contents(config.out + "2")


def test_kill_and_rerun_equals_undisturbed(
    config: PrepareConfig, tmp_path: Path, texts: list[str], contents: Contents
) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    # The first is done long before the others.
    for part, rows in enumerate((10, 250, 250, 250)):
        lines = (
            json.dumps({"text": f"{part} {row} " + " ".join(texts[row : row + 10])}) + "\n"
            for row in range(rows)
        )
        (folder / f"{part}.jsonl").write_text("".join(lines), "utf-8")
    config = replace(config, input=[str(folder)], workers=2)
    # Not subprocess: this one has imported everything already, as `executor.py` wants it.
    child = multiprocessing.get_context("forkserver").Process(target=prepare, args=(config,))
    child.start()
    partial = Path(f"{config.out}.partial")
    deadline_s = time.monotonic() + 60
    while not list(partial.glob("scratch/logs/tokenise/completions/*")):
        assert child.is_alive(), "finished before it could be killed"
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in partial.glob("scratch/counts/*")}
    assert 0 < len(done) < 4
    assert not Path(config.out).exists()

    prepare(replace(config, workers=1))
    prepare(replace(config, workers=1, out=config.out + "2"))
    assert contents(config.out) == contents(config.out + "2")
    assert not partial.exists()


def test_completed_shards_are_not_done_again(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, ranks = pipeline.TokenizeShard.run, []

    def run(step: pipeline.TokenizeShard, data: object, rank: int, world_size: int) -> None:
        ranks.append(rank)
        if ranks == [0, 1]:
            raise KeyboardInterrupt
        original(step, data, rank, world_size)

    monkeypatch.setattr(pipeline.TokenizeShard, "run", run)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert Path(f"{config.out}.partial").is_dir()
    prepare(config)
    assert ranks == [0, 1, 1, 2]


def test_killed_worker_keeps_what_is_done(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(executor: object) -> None:
        raise BrokenProcessPool("a worker is gone")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.QuietExecutor, "run", break_down)
        with pytest.raises(UserError, match="run again to continue"):
            prepare(config)
    assert Path(f"{config.out}.partial", "scratch", "request.json").is_file()
    prepare(config)


def test_other_request_starts_afresh(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, contents: Contents
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.Work, "merge", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    prepare(replace(config, seed=2))
    prepare(replace(config, seed=2, out=config.out + "2"))
    assert contents(config.out) == contents(config.out + "2")


def test_finished_data_is_reused_never_destroyed(
    config: PrepareConfig,
    capsys: pytest.CaptureFixture[str],
    jsonl_folder: Path,
    contents: Contents,
) -> None:
    manifest = prepare(config)
    before = contents(config.out)
    capsys.readouterr()
    assert prepare(replace(config, workers=2)) == manifest
    assert "reused" in capsys.readouterr().err
    assert "of another request" in refused(replace(config, seed=5))
    (jsonl_folder / "0.jsonl").write_text('{"text": "changed"}\n')
    assert "of another request" in refused(config)
    assert contents(config.out) == before


def test_foreign_folders_are_left_alone(config: PrepareConfig) -> None:
    out = Path(config.out)
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert "is not token data" in refused(config)
    assert (out / "thesis.txt").read_text() == "mine"
    partial = Path(f"{config.out}2.partial")
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        prepare(replace(config, out=config.out + "2"))
    assert (partial / "thesis.txt").read_text() == "mine"


def test_two_at_once_are_refused(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pipeline.Work.tokenise

    def tokenise(work: pipeline.Work, tokenizer: object) -> float:
        with pytest.raises(UserError, match="another groundlm prepare is writing"):
            prepare(config)
        return original(work, tokenizer)

    monkeypatch.setattr(pipeline.Work, "tokenise", tokenise)
    prepare(config)


def test_quiet_but_for_one_summary(
    config: PrepareConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(config)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "train " in captured.err
    assert "tokens/s" in captured.err


def test_hostile_text(config: PrepareConfig, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    long = "d" * 10**5 + " groa" * 10**6
    for name, content in {
        "bom.txt": b"\xef\xbb\xbfbom",
        "empty.txt": b"",
        "invalid.txt": b"ok\n\377\376\n\0\n",
        "joiner.txt": "\u200d".encode(),
        "crlf.txt": b"c\r\nd\r\n",
        "blank.txt": " \t\r\n\u2003".encode(),
        "no records.jsonl": b"\n\n",
        "zipped.jsonl": gzip.compress(b'{"text": "in gzip"}\n'),
        "lines.jsonl": b'{"text": "lone \\ud83d"}\n{"text": "\\u0000"}\n{"text": " "}\n'
        b'{"text": "<|endoftext|>"}\n{"text": "a<|endoftext|><|endoftext|>b"}\n'
        b'{"title": "no field"}\n{"text": null}\n{"text": []}\n{"text": 1}\n[]\n{"text": "cut\n'
        b'{"text": "%s"}\n{"text": "no final newline"}' % long.encode(),
    }.items():
        (folder / name).write_bytes(content)
    manifest = prepare(replace(config, input=[str(folder)], heldout_share=0))
    texts = ["bom", "ok\n\ufffd\ufffd\n\0\n", "\u200d", "c\r\nd\r\n", "in gzip", "lone \ufffd"]
    texts += ["\0", "<|endoftext|>", "a<|endoftext|><|endoftext|>b", long, "no final newline"]
    # `decoded` looks for exactly one EOS id a document.
    assert sorted(decoded(config.out, "train")) == sorted(texts)
    assert manifest.splits["train"].utf8_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.dropped == {
        "empty": 3,
        "files_without_records": 1,
        "malformed_json": 2,
        "missing_text": 2,
        "non_string_text": 2,
    }
    assert list(manifest.splits) == ["train"]


def word_level(tmp_path: Path, entries: int, **settings: object) -> str:
    """A tokenizer.json of words w0, w1, ... with EOS 1, optionally with a truncation."""
    words = {"<unk>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, entries)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    path = tmp_path / "words.json"
    path.write_text(json.dumps({**content, **settings}))
    return str(path)


def test_eos_as_a_plain_word_drops_the_document(config: PrepareConfig, tmp_path: Path) -> None:
    config = text_config(config, tmp_path, '{"text": "w2 </s> w3"}\n{"text": "w4 w5"}\n')
    manifest = prepare(replace(config, tokenizer=word_level(tmp_path, 9)))
    assert manifest.dropped == {"eos_in_text": 1}
    assert TokenSplit.open(config.out, "train").read(0, 3).tolist() == [4, 5, 1]


def test_wide_ids_and_no_truncation(config: PrepareConfig, tmp_path: Path) -> None:
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    config = text_config(config, tmp_path, '{"text": "w65535 w65536 w69999"}\n')
    for entries, dtype, ids in (
        (65_536, "uint16", [65535, 0, 0, 1]),
        (70_000, "uint32", [65535, 65536, 69999, 1]),
    ):
        tokenizer = word_level(tmp_path, entries, truncation=cut)
        out = f"{config.out}{entries}"
        manifest = prepare(replace(config, tokenizer=tokenizer, out=out))
        assert (manifest.dtype, manifest.vocab_size) == (dtype, entries)
        assert TokenSplit.open(out, "train").read(0, 4).tolist() == ids
    inputs, targets = TrainingWindows(TokenSplit.open(out, "train"), 3, 1, seed=1).batch(0)
    assert (inputs.tolist(), targets.tolist()) == ([ids[:3]], [ids[1:]])
    path = Path(out, "train", "000_train.ds")
    np.array([65535, 70_000, 69999, 1], "<u4").tofile(path)
    said = r"000_train.ds' has id 70000 at token 1 \(byte 4\), outside the vocabulary of 70,000"
    with pytest.raises(UserError, match=said):
        TokenSplit.open(out, "train").read(0, 4)


def test_heldout_input(config: PrepareConfig, tmp_path: Path, jsonl_folder: Path) -> None:
    (tmp_path / "held.txt").write_text("aside")
    config = replace(config, heldout_input=[str(tmp_path / "held.txt")])
    manifest = prepare(config)
    assert decoded(config.out, "heldout") == ["aside"]
    assert manifest.splits["train"].documents == 300
    assert manifest.source["heldout_share"] is None
    twice = replace(config, heldout_input=[str(jsonl_folder / "1.jsonl")], out=config.out + "2")
    assert "1.jsonl" in refused(twice)


def test_limit_counts_documents_over_all_files(config: PrepareConfig, texts: list[str]) -> None:
    prepare(replace(config, limit_documents=120, heldout_share=0))
    in_order = texts[0::3] + texts[1::3]
    assert sorted(decoded(config.out, "train")) == sorted(in_order[:120])


def test_many_files_make_few_shards(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "MAX_SHARDS", 4)
    monkeypatch.setattr(pipeline, "MAX_TOKENS_PER_FILE", 40)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"file {number}")
    config = replace(config, input=[str(folder)], heldout_share=0)
    manifest = prepare(config)
    assert len(manifest.splits["train"].files) > 2
    assert sorted(decoded(config.out, "train")) == sorted(f"file {n}" for n in range(30))


def test_trained_tokenizer_sees_the_train_split_once(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    original, seen = pipeline.train_tokenizer, []

    def train(stream: object, vocab_size: int) -> object:
        seen.extend(stream)
        return original(seen, vocab_size)

    monkeypatch.setattr(pipeline, "train_tokenizer", train)
    manifest = prepare(replace(config, tokenizer="train:300"))
    in_order = texts[0::3] + texts[1::3] + texts[2::3]
    assert seen == [text for text in in_order if not is_heldout(text, 1, 0.2)]
    assert manifest.tokenizer.vocab_size == 300
    assert sorted(decoded(config.out, "train")) == sorted(seen)
    seen.clear()
    monkeypatch.setattr(pipeline, "TOKENIZER_TEXT_BYTES", 100)
    prepare(replace(config, tokenizer="train:300", out=config.out + "2"))
    assert sum(len(text) for text in seen[:-1]) < 100 <= sum(len(text) for text in seen)


def test_trained_tokenizer_counts_drops_once(config: PrepareConfig, tmp_path: Path) -> None:
    config = text_config(config, tmp_path, '{"text": "a b"}\n{"text": " "}\n')
    assert prepare(replace(config, tokenizer="train:257")).dropped == {"empty": 1}


def test_no_text_field_names_the_fields(config: PrepareConfig, tmp_path: Path) -> None:
    config = text_config(config, tmp_path, '{"content": "a", "url": "b"}\n' * 3)
    for tokenizer in (config.tokenizer, "train:300"):
        said = refused(replace(config, tokenizer=tokenizer))
        assert "'text' (3 lack it)" in said
        assert "content, url with --text-key" in said
    prepare(replace(config, text_key="content"))


def test_nothing_in_a_split_is_refused_with_numbers(config: PrepareConfig, tmp_path: Path) -> None:
    one = text_config(config, tmp_path, '{"text": "only"}\n')
    said = refused(replace(one, heldout_share=0.01))
    assert "heldout split is empty" in said
    assert "0 of 1 documents" in said
    assert "--heldout-share 0.01" in said
    assert "--heldout-input" in said
    assert "train split is empty" in refused(replace(one, heldout_share=0.999999))
    blank = text_config(config, tmp_path, '{"text": ""}\n{\n')
    said = refused(blank)
    assert "one.jsonl' holds no documents (dropped: 1 empty, 1 malformed_json)" in said
    (tmp_path / "void.txt").write_text("")
    said = refused(replace(config, heldout_input=[str(tmp_path / "void.txt")]))
    assert "void.txt' holds no documents" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input": []}, "--input"),
        ({"heldout_share": 1.0}, "--heldout-share 1.0"),
        ({"heldout_share": float("nan")}, "--heldout-share nan"),
        ({"seed": -1}, "--seed -1"),
        ({"workers": 0}, "--workers 0"),
        ({"limit_documents": 0}, "--limit-documents 0"),
        ({"document_separator": ""}, "--document-separator"),
        ({"tokenizer": "train:many"}, "train:many"),
        ({"tokenizer": "train:256"}, "at least 257"),
        ({"tokenizer": "train:300", "eos_token": "x"}, "--eos-token"),
        ({"eos_token": "<none>"}, "<none>"),
        ({"subset": "sample"}, "--subset 'sample'"),
        ({"input": ["nowhere.txt"]}, "nowhere.txt"),
    ],
)
def test_wrong_settings(config: PrepareConfig, change: dict[str, object], said: str) -> None:
    assert said in refused(replace(config, **change))


@pytest.mark.parametrize("workers", [1, 2])
def test_damaged_input_in_mid_run_is_one_line(
    config: PrepareConfig, jsonl_folder: Path, workers: int
) -> None:
    (jsonl_folder / "9.parquet").write_bytes(b"PAR1 not really")
    assert "9.parquet' cannot be read" in refused(replace(config, workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
def test_full_disk_is_one_line_and_can_be_continued(
    config: PrepareConfig, contents: Contents, workers: int
) -> None:
    whole = replace(config, out=f"{config.out}-whole", workers=workers)
    prepare(whole)
    full = replace(config, workers=workers)
    command = [sys.executable, "-m", "groundlm", "prepare", "--input", *full.input, "--out"]
    command += [full.out, "--tokenizer", full.tokenizer, "--heldout-share", "0.2"]
    command += ["--workers", str(workers)]
    # 1 KiB: less than one of the token files.
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *command]
    result = subprocess.run(limited, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert result.returncode == 3, result.stderr
    assert "is not complete" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not Path(full.out).exists()
    prepare(full)
    assert contents(full.out) == contents(whole.out)
