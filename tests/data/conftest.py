"""Small inputs in every format, and a shared tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from groundlm.data.prepare import PrepareConfig
from groundlm.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """300 documents of 1 to 60 words, a few of them twice."""
    random = np.random.RandomState(3)
    words = [f"{stem}{ending}" for stem in ("gro", "pre", "me", "lo") for ending in "abcdefgh"]
    texts = [
        f"{number}: " + " ".join(random.choice(words, random.randint(1, 60)))
        for number in range(290)
    ]
    return texts + texts[:10]


@pytest.fixture(scope="session")
def tokenizer_dir(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, 300).save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def jsonl_folder(texts: list[str], tmp_path: Path) -> Path:
    """The texts in three JSONL files."""
    folder = tmp_path / "input"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part::3]]
        (folder / f"{part}.jsonl").write_text("".join(lines), "utf-8")
    return folder


@pytest.fixture
def config(jsonl_folder: Path, tokenizer_dir: str, tmp_path: Path) -> PrepareConfig:
    return PrepareConfig(
        input=[str(jsonl_folder)],
        out=str(tmp_path / "out"),
        tokenizer=tokenizer_dir,
        heldout_share=0.2,
    )


@pytest.fixture
def contents() -> Callable[[str | Path], dict[str, bytes]]:
    """A function: every file below a folder by relative path."""

    def read(folder: str | Path) -> dict[str, bytes]:
        root = Path(folder)
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    return read
