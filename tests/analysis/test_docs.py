"""The commands and code blocks of docs/analysis.md run, on a tiny model."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from groundlm.analysis.changes import known_changes
from groundlm.analysis.figures import FIGURES
from groundlm.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text()
MODEL, DATA = "runs/quickstart/checkpoints/step-000300", "data/pydocs"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(model_dir, token_data, tmp_path, monkeypatch):
    """The folders that the document names, where the test runs."""
    monkeypatch.chdir(tmp_path)
    model_dir(MODEL)
    Path("data").mkdir()
    Path(DATA).symlink_to(token_data)


@pytest.mark.usefixtures("here")
def test_commands_run():
    commands = [shlex.split(line) for line in "\n".join(blocks("bash")).splitlines()]
    assert [c[:2] for c in commands] == [["groundlm", "analyze"], ["groundlm", "ablate"]]
    small = {"analyze": ["--states", "300", "--window-tokens", "100"], "ablate": ["--tokens", "99"]}
    for command in commands:
        assert main([*command[1:], *small[command[1]]]) == 0
    files = {"stats.json", "ablate.json", "report.html"}
    assert files <= {p.name for p in Path("look").iterdir()}


@pytest.mark.usefixtures("here")
def test_examples_run():
    names: dict[str, object] = {}
    for i, block in enumerate(blocks("python")):
        exec(compile(block, f"docs/analysis.md block {i + 1}", "exec"), names)
    assert Path("retention.png").is_file()


def test_every_figure_and_intervention_is_named(tiny):
    assert all(f"`{name}`" in TEXT for name in FIGURES)
    ids = np.arange(1, 61).reshape(2, 30)
    for change in known_changes(tiny(), ids, after_tokens=4, resets=(8,)):
        name = re.sub(r"^head_\d", "head_<h>", change.name)
        name = re.sub(r"^reset_every_\d", "reset_every_<n>", name)
        name = re.sub(r"^(fast|slow)_pool_decay_mean", "..._pool_decay_mean", name)
        assert f"`{name}`" in TEXT, name
