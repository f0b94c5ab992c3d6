import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from groundlm.data import pydocs
from groundlm.data.corpora import InputOptions, InputTask, resolve_inputs
from groundlm.data.readers import READ_BYTES, split_stream
from groundlm.errors import UserError


def resolve(*inputs: Path | str, **changes: str) -> list[InputTask]:
    options = {"text_key": "text", "subset": None, "split": "train", "document_separator": None}
    return resolve_inputs([str(name) for name in inputs], InputOptions(**{**options, **changes}))


def read(*inputs: Path | str, **changes: str) -> tuple[list[str], dict[str, int]]:
    """All texts, and what was dropped by reason."""
    tasks = resolve(*inputs, **changes)
    texts = [document.text for task in tasks for document in task.documents()]
    dropped: dict[str, int] = {}
    for reader in {id(task.reader): task.reader for task in tasks}.values():
        for reason, count in reader.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return texts, dropped


def test_text_policy_of_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content, expected in (
        (b"ok\n\xff\xfe\n\0\n", "ok\n\ufffd\ufffd\n\0\n"),
        (b"\xef\xbb\xbfa\r\nb", "a\r\nb"),
        (b"a\xef\xbb\xbfb", "a\ufeffb"),
        ("\u200d".encode(), "\u200d"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"no final newline", "no final newline"),
    ):
        path.write_bytes(content)
        assert read(path) == ([expected], {})
    for content in (b"", b" \n\t\r\n", "\u2003\u00a0".encode(), b"\xef\xbb\xbf"):
        path.write_bytes(content)
        assert read(path) == ([], {"empty": 1})


def test_text_file_is_split_at_the_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\n\ntwo\n\n\n\n\n\nthree\n\n\n")
    assert read(path)[0] == ["one\n\n\ntwo\n\n\n\n\n\nthree\n\n\n"]
    assert read(path, document_separator="\n\n\n") == (["one", "two", "three"], {"empty": 1})
    assert read(path, document_separator=r"\n\n\n")[0] == ["one", "two", "three"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_separator_across_chunks(size: int) -> None:
    content = b"ab<|>cd<|><|>e<|"
    chunks = (content[at : at + size] for at in range(0, len(content), size))
    assert list(split_stream(chunks, b"<|>")) == [b"ab", b"cd", b"", b"e<|"]


def test_long_text_passes_whole(tmp_path: Path) -> None:
    text = "x" * (READ_BYTES + 5)
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt")[0] == [text]


def test_hostile_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "bom"}\n'
        b'{"text": "lone \\ud800 and \\udc00"}\n'
        b'{"text": "pair \\ud83d\\ude00"}\n'
        b'{"text": "bad \xff"}\r\n'
        b'{"text": ""}\n\n   \n'
        b'{"other": 1, "title": "t"}\n{"text": null}\n{"text": 5}\n{"text": ["a"]}\n'
        b'["text"]\n"text"\n{"text": "cut\n'
        b'{"text": "last", "metadata": "[", "media": 3}'
    )
    texts, dropped = read(path)
    assert texts == ["bom", "lone \ufffd and \ufffd", "pair \U0001f600", "bad \ufffd", "last"]
    assert dropped == {"empty": 1, "missing_text": 2, "non_string_text": 2, "malformed_json": 3}
    assert read(path, text_key="title")[0] == ["t"]


def test_deep_json_is_malformed_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + '\n{"text": "b"}\n')
    assert read(tmp_path / "a.jsonl") == (["b"], {"malformed_json": 1})


def test_compression_by_magic_bytes(tmp_path: Path) -> None:
    line = b'{"text": "one"}\n'
    (tmp_path / "named.jsonl").write_bytes(gzip.compress(line) + gzip.compress(line))
    (tmp_path / "plain.jsonl.gz").write_bytes(line)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(line))
    (tmp_path / "b.jsonl.zst").write_bytes(pa.compress(line * 3, "zstd", asbytes=True))
    assert len(read(tmp_path)[0]) == 7


def test_cut_files_are_named(tmp_path: Path) -> None:
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(9999))
    pq.write_table(pa.table({"text": ["a"] * 999}), tmp_path / "whole.parquet")
    for name, whole in (
        ("a.jsonl.gz", gzip.compress(content)),
        ("a.jsonl.zst", pa.compress(content, "zstd", asbytes=True)),
        ("a.parquet", (tmp_path / "whole.parquet").read_bytes()),
    ):
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=f"{name}' cannot be read") as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    invalid = pa.array([b"bad \xff"], pa.binary()).view(pa.string())
    strings = pa.array(["a\r\n", None, " ", "b"])
    for array, expected in (
        (strings, ["a\r\n", "b"]),
        (strings.cast(pa.large_string()), ["a\r\n", "b"]),
        (strings.dictionary_encode(), ["a\r\n", "b"]),
        (invalid, ["bad \ufffd"]),
    ):
        pq.write_table(pa.table({"text": array, "n": range(len(array))}), path)
        texts, dropped = read(path)
        assert texts == expected
        assert dropped == ({"missing_text": 1, "empty": 1} if len(array) == 4 else {})
    assert read(path, text_key="n")[1] == {"non_string_text": 1}
    tasks = resolve(path, text_key="content")
    assert list(tasks[0].documents()) == []
    assert tasks[0].reader.dropped == {"missing_text": 1}
    assert tasks[0].reader.keys == {"text", "n"}


def test_files_without_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert read(tmp_path) == ([], {"files_without_records": 2})


def test_folders_are_searched_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.md", "c.text", "README.md", ".git/x.txt", "_tmp/y.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "data.csv").write_text("no")
    assert read(tmp_path)[0] == ["a.txt", "b/1.md", "b/2.txt", "c.text"]
    assert read(tmp_path / "README.md")[0] == ["README.md"]


def test_content_tells_files_apart_and_not_their_times(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = resolve(path)[0].content
    path.touch()
    assert resolve(path)[0].content == before
    path.write_text("two")
    assert resolve(path)[0].content != before


def test_wrong_inputs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("hub unreachable\nadvice")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    for name, said in (
        (tmp_path / "a.csv", "is none of .parquet"),
        (tmp_path / "empty", "holds no .parquet"),
        (tmp_path / "no.txt", "does not exist"),
        ("data/no.jsonl", "does not exist"),
        ("owner/name", "hub: hub unreachable"),
    ):
        with pytest.raises(UserError) as caught:
            resolve(name)
        assert str(name) in str(caught.value)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_hub_data_set_is_read_shard_by_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in range(3):
        lines = [json.dumps({"text": f"{shard}.{row}"}) for row in range(4)] + ['{"text": " "}']
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    original, asked = datasets.load_dataset, []

    def local(dataset: str, **options: object) -> object:
        asked.append((dataset, options["name"], options["split"], options["streaming"]))
        files = sorted(map(str, tmp_path.glob("*.jsonl")))
        return original("json", data_files=files, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", local)
    tasks = resolve("owner/name", subset="sample", split="validation")
    assert [(task.rank, task.world_size) for task in tasks] == [(0, 3), (1, 3), (2, 3)]
    texts = [[document.text for document in task.documents()] for task in tasks]
    assert texts == [[f"{shard}.{row}" for row in range(4)] for shard in range(3)]
    assert tasks[0].reader.dropped == {"empty": 3}
    assert set(asked) == {("owner/name", "sample", "validation", True)}


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(pydocs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    yield tmp_path
    pydocs.documents.cache_clear()


def test_pydocs_reads_docstrings_without_importing(small_library: Path) -> None:
    for name, source in (
        ("b/__init__.py", '"""Package b."""\nraise SystemExit\n'),
        ("a.py", 'class C:\n    "Class."\n    def m(self):\n        """Method.\n        More."""'),
        ("silent.py", "x = 1"),
        ("broken.py", "def ("),
        ("test/t.py", '"""No."""'),
        ("site-packages/s.py", '"""No."""'),
    ):
        (small_library / name).parent.mkdir(exist_ok=True)
        (small_library / name).write_text(source)
    documents = list(resolve("pydocs")[0].documents())
    modules = [document for document in documents if "/module/" in document.id]
    assert [document.text for document in modules] == [
        "a.C\n\nClass.\n\na.C.m\n\nMethod.\nMore.\n",
        "b\n\nPackage b.\n",
    ]
    topics = [document for document in documents if "/topic/" in document.id]
    assert len(topics) > 50
    assert documents == topics + modules


def test_pydocs_of_this_python() -> None:
    texts, dropped = read("pydocs")
    assert dropped == {}
    assert 1.5e6 < sum(len(text.encode()) for text in texts) < 4e6
    assert any("json.JSONEncoder" in text for text in texts)
