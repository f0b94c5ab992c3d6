"""The quickstart on a tiny setting: it ends with its numbers, and running it again reuses all."""

import json
from pathlib import Path

import pytest
import yaml

from groundlm.cli import main


@pytest.fixture
def arguments(tmp_path):
    config = {
        "model": {"state_size": 16, "embedding_size": 8, "ffn_size": 24, "num_heads": 1,
                  "head_k_dim": 4, "head_v_dim": 4},
        "data": {"window_tokens": 32},
        "training": {"steps": 3, "batch_size": 4, "eval_every": 0},
    }  # fmt: skip
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["quickstart", "--data", str(tmp_path / "data"), "--run", str(tmp_path / "run"),
            "--config", str(path), "--tokenizer", "train:300", "--max-new-tokens", "5"]  # fmt: skip


def test_quickstart_from_nothing_and_again(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first.keys() >= {
        "heldout_bits_per_byte",
        "unigram_bits_per_byte",
        "heldout_perplexity",
        "tokens",
        "tokens_per_s",
        "run",
        "report",
    }
    assert Path(first["report"]).read_text().startswith("<!doctype html>")
    assert first["tokens"] == 3 * 4 * 32
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert main(arguments) == 0
    captured = capsys.readouterr()
    again = json.loads(captured.out.splitlines()[-1])
    assert again["heldout_bits_per_byte"] == first["heldout_bits_per_byte"]
    assert "already stands at step 3" in captured.out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == written
