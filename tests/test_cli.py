"""The command line: parsing, help, one-line errors, exit codes."""

import json
import re

import pytest

from groundlm.cli import COMMANDS, main, parse
from groundlm.data.prepare import PrepareConfig
from groundlm.training.config import TrainConfig
from helpers import write_documents


def error_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_flag(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for option in re.split(r"\n  (?=--)", out[out.index("options:") :])[1:]:
        words = re.split(r"\((?:required|type)", option)[0].split()
        said = [w for w in words if w[0].isalpha() and not w.rstrip("]").isupper()]
        assert len(said) >= 2, option


def test_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean train?" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.learning-rat", "1"], "did you mean optimizer.learning_rate?"),
        (["--training.steps", "many"], "training.steps"),
        (["--config", "gpn-m-1l-sx"], "did you mean gpn-m-1l-s?"),
        (["--steps", "3"], "unknown option --steps (did you mean training.steps?)"),
    ],
)
def test_bad_train_arguments(arguments, message, capsys):
    assert main(["train", *arguments]) == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data: {window_token: 3}",
            "unknown key data.window_token (did you mean data.window_tokens?)",
        ),
        (
            "dat: {window_tokens: 3}",
            "unknown key dat.window_tokens (did you mean data.window_tokens?)",
        ),
        ("model: {stat_size: 3}", "unknown key model.stat_size (did you mean model.state_size?)"),
        ("training: [1", "config"),
    ],
)
def test_bad_configuration_file(text, message, tmp_path, token_data, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["train", "--config", str(path), "--data.path", str(token_data)]) == 2
    assert message in error_line(capsys)


def test_flags_overrule_the_file_and_dashes_are_underscores(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {state_size: 8, ffn_size: 9}\ntraining: {steps: 7}\n")
    arguments = ["--config", str(path), "--model.state-size=12", "--training.batch_size", "3"]
    config = parse(TrainConfig, arguments, "train", uses_presets=True)
    assert config.model == {"state_size": 12, "ffn_size": 9}
    assert (config.training.steps, config.training.batch_size) == (7, 3)


def test_lists_take_several_values_and_keep_dashes_in_them():
    config = parse(
        PrepareConfig, ["--input", "a-b.txt", "c d", "--out=x-y", "--seed", "4"], "prepare"
    )
    assert (config.input, config.out, config.seed) == (["a-b.txt", "c d"], "x-y", 4)


def test_missing_required_flag(capsys):
    assert main(["prepare", "--out", "x"]) == 2
    assert "input" in error_line(capsys)


def test_eval_prints_a_table_and_json_last(train_config, token_data, capsys):
    from groundlm.training.loop import run_train

    figures = run_train(train_config())
    assert main(["eval", "--model", figures["checkpoint"], "--data", str(token_data)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["window_tokens"] == 16
    assert result["perplexity"] > 1
    assert "bits per byte" in out
    manifest = json.loads((token_data / "manifest.json").read_text())
    assert result["tokens"] == manifest["splits"]["heldout"]["tokens"]
    assert result["utf8_bytes"] == manifest["splits"]["heldout"]["utf8_bytes"]


def test_eval_refuses_another_tokenizer(train_config, token_data, tmp_path, capsys):
    from groundlm.training.loop import run_train

    figures = run_train(train_config())
    write_documents(tmp_path / "other.jsonl", 200, seed=5)
    other = str(tmp_path / "other")
    source = str(tmp_path / "other.jsonl")
    assert main(["prepare", "--input", source, "--out", other, "--tokenizer", "train:290"]) == 0
    capsys.readouterr()
    assert main(["eval", "--model", figures["checkpoint"], "--data", other]) == 2
    assert "is not the one that made the token files" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--model", "{model}", "--split", "valid"], "no split 'valid'"),
        (["--model", "{model}", "--window-tokens", "-3"], "window-tokens is -3"),
        (["--model", "{model}", "--batch-size", "0"], "batch-size is 0"),
        (["--model", "{model}", "--data", "nodata"], "nodata"),
    ],
)
def test_bad_eval_arguments(arguments, message, train_config, token_data, capsys):
    from groundlm.training.loop import run_train

    model = run_train(train_config(training__steps=1))["checkpoint"]
    capsys.readouterr()
    given = [a.format(model=model) for a in arguments]
    assert main(["eval", "--data", str(token_data), *given]) == 2
    assert message in error_line(capsys)
