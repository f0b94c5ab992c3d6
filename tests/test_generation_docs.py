"""The code blocks of docs/state.md run as printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_the_examples_of_the_state_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "state.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"docs/state.md block {i + 1}", "exec"), names)
