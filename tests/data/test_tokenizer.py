import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from groundlm.data.tokenizer import (
    cut_runs,
    load_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
    vocabulary_size,
)
from groundlm.errors import UserError

HOSTILE = "a\r\n\0\u200d é 漢字 \U0001f600\t  <|endoftext|> end"


def bare_file(folder: Path, entries: list[str]) -> Path:
    backend = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, entries[0]))
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def test_training_is_deterministic_and_lossless(texts: list[str]) -> None:
    first, second = train_tokenizer(texts, 300), train_tokenizer(iter(texts), 300)
    assert tokenizer_sha256(first) == tokenizer_sha256(second)
    assert tokenizer_sha256(first) != tokenizer_sha256(train_tokenizer(texts, 301))
    assert vocabulary_size(first) == 300
    assert first.eos_token == first.bos_token == "<|endoftext|>"
    assert first.decode(first.encode(HOSTILE)) == HOSTILE
    assert not first.convert_ids_to_tokens(first.encode("word"))[0].startswith("Ġ")


def test_a_long_line_without_spaces_is_trained_on_in_time() -> None:
    random = np.random.RandomState(0)
    line = "".join(random.choice(list("acgt"), 2_000_000))
    tokenizer = train_tokenizer([line], 300)
    assert vocabulary_size(tokenizer) == 300
    text = "a b" + "c" * 2500 + " " * 1500 + "d"
    assert "".join(cut_runs(text)) == text
    runs = [run for piece in cut_runs(text) for run in re.findall(r"\S+|\s+", piece)]
    assert max(map(len, runs)) == 1000
    assert list(cut_runs("a b\n")) == ["a b\n"]


def test_alphabet_is_whole_and_size_checked(texts: list[str]) -> None:
    smallest = train_tokenizer(texts, 257)
    assert vocabulary_size(smallest) == 257
    assert smallest.decode(smallest.encode("\x00\x7fé\U0010ffff")) == "\x00\x7fé\U0010ffff"
    with pytest.raises(UserError, match=r"at least 257 .*not 256"):
        train_tokenizer(texts, 256)


def test_sha256_survives_saving_and_settings(texts: list[str], tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts, 300)
    wanted = tokenizer_sha256(tokenizer)
    tokenizer.save_pretrained(str(tmp_path))
    assert tokenizer_sha256(load_tokenizer(str(tmp_path))) == wanted
    assert tokenizer_sha256(AutoTokenizer.from_pretrained(str(tmp_path))) == wanted
    tokenizer("a b c", truncation=True, max_length=2)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    assert tokenizer_sha256(tokenizer) == wanted


def test_bare_file_or_folder_gets_its_known_eos(tmp_path: Path) -> None:
    path = bare_file(tmp_path, ["<unk>", "a", "<|endoftext|>", "</s>"])
    for source in (path, tmp_path):
        tokenizer = load_tokenizer(str(source))
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 3)
    assert load_tokenizer(str(path), "<|endoftext|>").eos_token_id == 2


def test_ids_with_holes_count_to_the_largest(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 7, "</s>": 4}, "<unk>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary_size(load_tokenizer(str(tmp_path))) == 8


def test_unusable_sources_are_named_in_one_line(tmp_path: Path) -> None:
    no_eos = str(bare_file(tmp_path, ["<unk>", "a"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"a": 1}))
    for source, eos_token, said in (
        (no_eos, None, "--eos-token"),
        (no_eos, "</s>", "--eos-token '</s>' is not among the 2 entries"),
        (str(tmp_path / "empty"), None, "holds no tokenizer.json"),
        (str(tmp_path / "broken.json"), None, "cannot be loaded"),
        (str(tmp_path / "other.json"), None, "cannot be loaded"),
        (str(tmp_path / "none.json"), None, "no such file or folder"),
    ):
        with pytest.raises(UserError) as caught:
            load_tokenizer(source, eos_token)
        assert said in str(caught.value)
        assert source in str(caught.value)
        assert "\n" not in str(caught.value)


def test_unknown_hub_name_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no such model\nand much advice")

    monkeypatch.setattr("groundlm.data.tokenizer.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(UserError, match=r"^tokenizer 'nobody/nothing' .*: no such model$"):
        load_tokenizer("nobody/nothing")
