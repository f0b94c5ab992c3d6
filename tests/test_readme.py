"""Every command and code block of the README runs, on a tiny setting."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from groundlm.cli import COMMANDS, main, parse, presets
from groundlm.data.prepare import PrepareConfig
from groundlm.training.config import TrainConfig
from helpers import write_documents

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TINY = ["--model.state-size", "16", "--model.embedding-size", "8", "--model.ffn-size", "24",
        "--model.num-heads", "1", "--model.head-k-dim", "4", "--model.head-v-dim", "4",
        "--data.window-tokens", "16", "--training.steps", "2", "--training.batch-size", "2",
        "--training.eval-windows", "2"]  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line]


def test_local_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-texts").mkdir()
    write_documents(tmp_path / "my-texts" / "a.jsonl", 300)
    mine = [c for c in commands() if any("mine" in word for word in c)]
    assert [c[1] for c in mine] == ["prepare", "train", "eval", "generate", "plot"]
    for command in mine:
        words = [w.replace("train:4096", "train:300") for w in command[1:]]
        words = [w.replace("step-000500", "step-000002") for w in words]
        if words[0] == "train":
            sizes = yaml.safe_load((ROOT / "src/groundlm/presets/gpn-m-1l-s.yaml").read_text())
            sizes["model"].pop("vocab_size")  # the tiny tokenizer has another
            Path("small.yaml").write_text(yaml.safe_dump(sizes))
            words = [w.replace("gpn-m-1l-s", "small.yaml") for w in words] + TINY
        assert main(words) == 0, (command, capsys.readouterr().err)
    assert Path("mine.png").exists()


def test_commands_for_larger_machines_parse():
    (hub,) = [c for c in commands() if "HuggingFaceFW/fineweb-edu" in c]
    config = parse(PrepareConfig, hub[2:], "prepare")
    assert (config.subset, config.out) == ("sample-10BT", "data/fineweb-edu")
    (ranks,) = [c for c in commands() if c[0] == "torchrun"]
    arguments = ranks[ranks.index("train") + 1 :]
    trained = parse(TrainConfig, arguments, "train", uses_presets=True)
    assert trained.data.path == config.out


def test_compared_preset_exists():
    """Its table is made in `tests/comparison`."""
    (compare,) = [c for c in commands() if c[1] == "compare"]
    assert compare[2] in presets("compare")


def test_python_block_runs(train_config, tmp_path):
    from groundlm.training.loop import run_train

    model = run_train(train_config(training__steps=2))["checkpoint"]
    (code,) = blocks("python")
    code = code.replace("runs/quickstart/checkpoints/step-000300", model)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_table(name):
    assert f"`groundlm {name.split()[0]}`" in README


def test_preset_table_has_the_counts():
    from test_presets import PARAMETERS

    assert all(f"`{name}`" in README for name in PARAMETERS)
    assert all(f"{PARAMETERS[n]:,}" in README for n in PARAMETERS if n.endswith(("130m", "xs")))


def test_linked_documents_exist():
    for target in re.findall(r"\]\((docs/[\w./-]+)\)", README):
        assert (ROOT / target).is_file(), target


def test_numbers_of_the_readme_are_those_of_the_log():
    log = (ROOT / "docs" / "log.md").read_text()
    bits = re.search(r"held-out bits per byte \| ([\d.]+)", README)
    assert bits is not None
    logged = [
        json.loads(x) for x in re.findall(r"^\{.*heldout_bits_per_byte.*\}$", log, re.MULTILINE)
    ]
    assert any(f"{r['heldout_bits_per_byte']:.3f}" == bits[1] for r in logged)
