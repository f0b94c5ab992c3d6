import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from groundlm.data import pipeline
from groundlm.data.info import DataInfoConfig, data_info
from groundlm.data.prepare import PrepareConfig, prepare
from groundlm.data.tokenizer import load_tokenizer, train_tokenizer
from groundlm.data.windows import TokenSplit
from groundlm.errors import UserError

HOSTILE = "[bold]x[/bold] é漢字😀 \u202e\u200d\x1b[31m\0\r\n\\n <|endoftext|>"
SHOWN = r"[bold]x[/bold] é漢字😀 \u202e\u200d\x1b[31m\x00\r\n\\n <|endoftext|>"


def test_counts_in_tables_and_as_json(
    config: PrepareConfig, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = prepare(replace(config, limit_documents=250))
    capsys.readouterr()
    data_info(DataInfoConfig(config.out))
    shown, last = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    document = json.loads(last)
    assert document["dropped"] == manifest.dropped
    assert document["vocab_size"] == 300
    assert document["versions"] == manifest.versions
    for name, split in manifest.splits.items():
        found = document["splits"][name]
        assert found["files"][0]["size_bytes"] == 2 * split.tokens
        assert found["bytes_per_token"] == pytest.approx(split.utf8_bytes / split.tokens)
        ids = TokenSplit.open(config.out, name).read(0, split.tokens)
        assert found["ids_used"] == len(set(ids.tolist()))
        row = rf"{name} .* {split.tokens:,} .* {split.documents:,} .* {split.utf8_bytes:,} "
        assert re.search(row, shown)
        assert len(re.findall(rf"^{name}, tokens ", shown, re.MULTILINE)) == 3
    for said in (manifest.tokenizer.sha256[:12], "300 ids, stored as uint16", "(id 0)", "250"):
        assert said in shown
    assert "nothing" in shown


def test_windows_are_escaped_text_chosen_by_the_seed(
    config: PrepareConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text((json.dumps({"text": HOSTILE}) + "\n") * 2)
    prepare(replace(config, input=[str(path)], heldout_share=0))
    tokens = TokenSplit.open(config.out, "train").tokens
    shown = []
    for window_tokens, seed in ((tokens, 1), (3, 1), (3, 1), (3, 2)):
        capsys.readouterr()
        data_info(DataInfoConfig(config.out, windows=5, window_tokens=window_tokens, seed=seed))
        out = capsys.readouterr().out
        shown.append(out[out.index("\ntrain, tokens") :])
    whole = f"\ntrain, tokens 0 to {tokens - 1}\n" + f"{SHOWN}<|endoftext|>\n" * 2
    assert shown[0].startswith(whole)
    assert shown[1] == shown[2] != shown[3]
    assert "\ufffd" in "".join(shown), "no character was cut"


def test_output_of_any_encoding_and_width(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "漢.jsonl"
    path.write_text((json.dumps({"text": HOSTILE}) + "\n") * 3)
    monkeypatch.setattr(pipeline, "MAX_TOKENS_PER_FILE", 60)
    manifest = prepare(replace(config, input=[str(path)], heldout_share=0))
    assert len(manifest.splits["train"].files) > 1
    monkeypatch.setenv("COLUMNS", "20")
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    data_info(DataInfoConfig(config.out))
    out.seek(0)
    text = out.read()
    assert json.loads(text.splitlines()[-1])["source"]["input"] == [str(path)]
    assert "on purpose" in " ".join(text.split())


def test_every_id_is_looked_at(config: PrepareConfig) -> None:
    manifest = prepare(replace(config, heldout_share=0))
    path = Path(config.out, "train", "000_train.ds")
    ids = np.fromfile(path, "<u2")
    at = int(np.flatnonzero(ids != 0)[-1])
    said = f"has id 300 at token {at:,} .*outside the vocabulary of 300"
    for wrong, expected in ((300, said), (0, "000_train.ds' has SHA-256 .*damaged")):
        changed = ids.copy()
        changed[at] = wrong
        changed.tofile(path)
        with pytest.raises(UserError, match=expected):
            data_info(DataInfoConfig(config.out))
    ids.tofile(path)
    data_info(DataInfoConfig(config.out))
    folder = Path(config.out, "tokenizer")
    train_tokenizer(["other text"], 300).save_pretrained(str(folder))
    assert load_tokenizer(str(folder))
    with pytest.raises(UserError, match=f"not the {manifest.tokenizer.sha256[:12]}"):
        data_info(DataInfoConfig(config.out))


def test_wrong_settings_and_folders(config: PrepareConfig, tmp_path: Path) -> None:
    for wrong in ({"windows": -1}, {"window_tokens": 0}, {"seed": -1}):
        with pytest.raises(UserError, match="--windows"):
            data_info(DataInfoConfig(str(tmp_path), **wrong))
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        data_info(DataInfoConfig(str(tmp_path)))
