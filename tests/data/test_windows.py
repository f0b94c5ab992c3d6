import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from groundlm.data import integrity, windows
from groundlm.data.integrity import VERIFIED_NAME, file_sha256
from groundlm.data.manifest import FileInfo, Manifest, SplitInfo, TokenizerInfo
from groundlm.data.windows import TokenSplit, TrainingWindows
from groundlm.errors import UserError

VOCAB, EOS = 50, 0
FILE_TOKENS = (7, 1, 40, 53)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """101 tokens in four files: ids 1 to 49 in turn, an EOS at every tenth and at files' ends."""
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    files, value = [], 0
    for number, count in enumerate(FILE_TOKENS):
        ids = np.array([1 + (value + i) % 49 for i in range(count)], dtype="<u2")
        value += count
        ids[9::10] = EOS
        ids[-1] = EOS
        ends = (np.flatnonzero(ids == EOS) + 1).astype("<u8")
        path = folder / f"{number:03d}_train.ds"
        index = folder / f"{path.name}.index"
        ids.tofile(path)
        ends.tofile(index)
        sums = file_sha256(path), file_sha256(index)
        files.append(FileInfo(path.name, count, len(ends), 2 * count, *sums))
    split = SplitInfo(files, sum(FILE_TOKENS), sum(file.documents for file in files), 400)
    tokenizer = TokenizerInfo("t", "0" * 64, VOCAB, "<e>", EOS)
    Manifest(tokenizer, "uint16", VOCAB, 1, {}, {"train": split}, {}, "0" * 64, {}).save(
        tmp_path / "data"
    )
    return tmp_path / "data"


def all_ids(data_dir: Path) -> np.ndarray:
    return np.concatenate(
        [np.fromfile(path, "<u2") for path in sorted((data_dir / "train").glob("*.ds"))]
    ).astype(np.int64)


def test_split_reads_across_files(data_dir: Path) -> None:
    split, ids = TokenSplit.open(data_dir, "train"), all_ids(data_dir)
    assert (split.tokens, split.documents) == (101, 12)
    assert (split.utf8_bytes, split.vocab_size, split.eos_token_id) == (400, VOCAB, EOS)
    for start in range(102):
        for length in (0, 1, 2, 9, 101 - start):
            if start + length <= 101:
                found = split.read(start, length)
                assert found.dtype == np.int64
                assert np.array_equal(found, ids[start : start + length])
    assert np.array_equal(split.document_ends, np.flatnonzero(ids == EOS) + 1)
    for start, length in ((-1, 2), (100, 2), (0, -1)):
        with pytest.raises(ValueError, match="split of 101"):
            split.read(start, length)


@pytest.mark.parametrize("chunk", [1, 10, 1000])
def test_unigram_counts(data_dir: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNK_TOKENS", chunk)
    counts = TokenSplit.open(data_dir, "train").unigram_counts()
    assert np.array_equal(counts, np.bincount(all_ids(data_dir), minlength=VOCAB))
    assert counts.shape == (VOCAB,)


def test_wide_ids(data_dir: Path) -> None:
    manifest = Manifest.load(data_dir)
    info, files = manifest.splits["train"], []
    for file in info.files:
        path = data_dir / "train" / file.name
        np.fromfile(path, "<u2").astype("<u4").tofile(path)
        files.append(replace(file, sha256=file_sha256(path)))
    manifest = replace(manifest, splits={"train": replace(info, files=files)})
    replace(manifest, vocab_size=70_000, dtype="uint32").save(data_dir)
    assert TokenSplit.open(data_dir, "train").read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    replace(manifest, vocab_size=70_000).save(data_dir)
    with pytest.raises(UserError, match=r"70,000 entries are not stored as uint16"):
        TokenSplit.open(data_dir, "train")


def test_id_outside_the_vocabulary_is_placed(data_dir: Path) -> None:
    path = data_dir / "train" / "002_train.ds"
    split = TokenSplit.open(data_dir, "train")
    ids = np.fromfile(path, "<u2")
    ids[15] = VOCAB
    ids.tofile(path)
    split.read(0, 8 + 15)
    said = r"002_train.ds' has id 50 at token 15 \(byte 30\), outside the vocabulary of 50"
    with pytest.raises(UserError, match=said):
        split.read(5, 30)
    with pytest.raises(UserError, match=said):
        split.unigram_counts()
    with pytest.raises(UserError, match=said):
        TokenSplit.open(data_dir, "train")


def test_changed_content_of_the_right_size_is_named(data_dir: Path) -> None:
    TokenSplit.open(data_dir, "train")
    marker = data_dir / "train" / VERIFIED_NAME
    remembered = marker.read_text()
    path = data_dir / "train" / "002_train.ds"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"002_train.ds' has SHA-256 .*damaged"):
        TokenSplit.open(data_dir, "train")
    assert marker.read_text() == remembered
    content[8] ^= 1
    path.write_bytes(content)
    for broken in ("", "[]", "{"):
        marker.write_text(broken)
        TokenSplit.open(data_dir, "train")
    assert marker.read_text() != remembered


def test_a_copy_is_read_again(data_dir: Path, tmp_path: Path) -> None:
    """`cp -a` takes the marker and the times along, and damage happens in copying."""
    TokenSplit.open(data_dir, "train")
    copy = tmp_path / "copy"
    shutil.copytree(data_dir, copy)
    path = copy / "train" / "003_train.ds"
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match=r"003_train.ds' has SHA-256"):
        TokenSplit.open(copy, "train")


def test_sound_files_are_read_through_once(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(
        integrity, "file_sha256", lambda path: read.append(path) or file_sha256(path)
    )
    TokenSplit.open(data_dir, "train")
    assert len(read) == 2 * len(FILE_TOKENS)
    TokenSplit.open(data_dir, "train")
    assert len(read) == 2 * len(FILE_TOKENS)


def damage(data_dir: Path, how: str) -> None:
    path = data_dir / "train" / "002_train.ds"
    index = path.with_name(f"{path.name}.index")
    ends = np.fromfile(index, "<u8")
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\0\0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
    elif how == "index gone":
        index.unlink()
    elif how == "index cut":
        index.write_bytes(index.read_bytes()[:-8])
    elif how == "index beyond":
        np.append(ends[:-1], np.uint64(41)).tofile(index)
    elif how == "index falling":
        ends[[0, 1]] = ends[[1, 0]]
        ends.tofile(index)
    elif how == "foreign":
        np.roll(np.fromfile(path, "<u2"), 1).tofile(path)
    else:
        raise ValueError(how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", r"002_train.ds' has 79 bytes, not the 80"),
        ("longer", r"002_train.ds' has 82 bytes, not the 80"),
        ("empty", r"002_train.ds' has 0 bytes, not the 80"),
        ("gone", r"002_train.ds' cannot be read"),
        ("index gone", r"002_train.ds.index' cannot be read"),
        ("index cut", r"002_train.ds.index' has 24 bytes, not the 32"),
        ("index beyond", r"002_train.ds.index' ends at token 41, its file at 40"),
        ("index falling", r"002_train.ds.index': document ends are not ascending"),
        ("foreign", r"002_train.ds': token 9 ends a document but has id"),
    ],
)
def test_damaged_files_are_named(data_dir: Path, how: str, said: str) -> None:
    damage(data_dir, how)
    with pytest.raises(UserError, match=said):
        TokenSplit.open(data_dir, "train")


def test_missing_and_foreign_folders_are_named(data_dir: Path, tmp_path: Path) -> None:
    for folder, split, said in (
        (tmp_path / "nowhere", "train", "does not exist"),
        (tmp_path, "train", "holds no manifest.json"),
        (data_dir, "heldout", "no split 'heldout', only train"),
    ):
        with pytest.raises(UserError, match=said):
            TokenSplit.open(folder, split)
    path = data_dir / "manifest.json"
    content = json.loads(path.read_text())
    for broken, said in (
        ("{", "cannot be read"),
        ("[]", "is of format"),
        (json.dumps({**content, "format_version": 1}), "is of format"),
        (json.dumps({k: v for k, v in content.items() if k != "splits"}), "is damaged"),
        (json.dumps({**content, "splits": {"train": {"x": 1}}}), "is damaged"),
        (json.dumps({**content, "splits": []}), "is damaged"),
        (json.dumps({**content, "vocab_size": "x"}), "is damaged"),
    ):
        path.write_text(broken)
        with pytest.raises(UserError, match=said) as caught:
            TokenSplit.open(data_dir, "train")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window_tokens", [1, 9, 10, 50, 99, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_each_window_once_an_epoch(data_dir: Path, window_tokens: int, batch_size: int) -> None:
    split, ids = TokenSplit.open(data_dir, "train"), all_ids(data_dir)
    data = TrainingWindows(split, window_tokens, batch_size, seed=4)
    count = data.num_windows
    assert count == 100 // window_tokens
    steps = -(-3 * count // batch_size)
    batches = [data.batch(step) for step in range(steps)]
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (batch_size, window_tokens)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    rows = torch.cat([torch.cat([i, t[:, -1:]], 1) for i, t in batches]).tolist()
    expected = sorted(
        ids[w * window_tokens : (w + 1) * window_tokens + 1].tolist() for w in range(count)
    )
    for epoch in range(3):
        assert sorted(rows[epoch * count : (epoch + 1) * count]) == expected


def test_order_is_a_pure_function_of_seed_and_step(data_dir: Path) -> None:
    split = TokenSplit.open(data_dir, "train")
    data = TrainingWindows(split, 5, 8, seed=4)
    forward = [data.batch(step)[0] for step in range(12)]
    for step in (11, 0, 7, 3, 3):
        assert torch.equal(data.batch(step)[0], forward[step])
        fresh = TrainingWindows(split, 5, 8, seed=4)
        assert torch.equal(fresh.batch(step)[0], forward[step])
        parts = [fresh.rows(step, first, count) for first, count in ((0, 3), (3, 0), (3, 5))]
        for whole, half in zip(fresh.batch(step), zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(half), whole)
    assert len(data._permutations) <= 2
    other = TrainingWindows(split, 5, 8, seed=5)
    assert not torch.equal(torch.cat([other.batch(s)[0] for s in range(2)]), torch.cat(forward[:2]))
    first, second = ([data.window_at(e * 20 + i) for i in range(20)] for e in (0, 1))
    assert first != second
    assert first != sorted(first)


def test_order_is_frozen(data_dir: Path) -> None:
    data = TrainingWindows(TokenSplit.open(data_dir, "train"), 10, 2, seed=1234)
    assert [data.window_at(sample) for sample in range(20)] == FROZEN


# Runs that were stopped before an upgrade must go on with the same windows after it.
FROZEN = [3, 8, 6, 4, 9, 1, 5, 2, 0, 7, 3, 9, 7, 6, 4, 1, 8, 2, 5, 0]


def test_too_small_and_wrong_values_are_refused(data_dir: Path) -> None:
    split = TokenSplit.open(data_dir, "train")
    with pytest.raises(UserError, match=r"101 tokens: a window of 101 needs 102"):
        TrainingWindows(split, 101, 1, seed=1)
    for window_tokens, batch_size, seed in ((0, 1, 1), (1, 0, 1), (1, 1, -1), (1, 1, 2**32)):
        with pytest.raises(UserError, match="at least 1"):
            TrainingWindows(split, window_tokens, batch_size, seed)
    data = TrainingWindows(split, 5, 4, seed=1)
    for step, first, count in ((-1, 0, 1), (0, -1, 1), (0, 3, 2)):
        with pytest.raises(ValueError, match="batch of 4"):
            data.rows(step, first, count)
