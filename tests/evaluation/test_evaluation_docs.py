"""The commands and the Python of docs/evaluation.md are real."""

import re
import shlex
from pathlib import Path

import pytest
from passages import PASSAGES

from groundlm.cli import parse
from groundlm.data.tokenizer import load_tokenizer
from groundlm.evaluation.command import EvalConfig

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line)
    for language, block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if not language
]


@pytest.mark.parametrize("words", [c[2:] for c in COMMANDS if c[:2] == ["groundlm", "eval"]])
def test_eval_commands_parse(words):
    assert parse(EvalConfig, words, "eval").model


def test_options_that_the_text_names_exist():
    fields = {f"--{name.replace('_', '-')}" for name in EvalConfig.__dataclass_fields__}
    for option in re.findall(r"`(--(?!model|include|training)[a-z][\w-]+)", TEXT):
        assert option in fields, option


def test_python_block_runs(model, token_data):
    (code,) = (block for language, block in BLOCKS if language == "python")
    names = {
        "model": model,
        "tokenizer": load_tokenizer(str(token_data / "tokenizer")),
        "ids": list(range(20)),
        "passages": PASSAGES,
    }
    exec(code.replace("window=2048", "window=512"), names)
    assert names["tokens"] == 20
    assert names["scores"]["passages"] == len(PASSAGES)
