"""`groundlm analyze` and `groundlm ablate` on tiny models: files, degenerate text, refusals."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from groundlm import GPNForCausalLM
from groundlm.analysis import stats
from groundlm.analysis.ablate import loss_by_context, paired
from groundlm.analysis.report import number
from groundlm.cli import main
from groundlm.models import build_model
from helpers import ONE_THREAD, tiny_config, write_documents

SMALL = ["--states", "400", "--window-tokens", "100", "--example-tokens", "12"]


def strict(path: Path) -> dict:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def numbers(value) -> set[str]:
    """Every number of a JSON value, as JSON writes it."""
    if isinstance(value, dict):
        return set().union(*map(numbers, value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*map(numbers, value)) if value else set()
    return {json.dumps(value)} if isinstance(value, int | float) else set()


class Page(HTMLParser):
    """Addresses that a page would fetch, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.text += data


def test_analyze_writes_stats_plots_and_a_report(model_dir, token_data, tmp_path, capsys):
    model, out = model_dir(), tmp_path / "a"
    command = ["analyze", "--model", model, "--data", str(token_data), *SMALL]
    assert main([*command, "--out", str(out)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"report": str(out / "report.html"), "stats": str(out / "stats.json")}
    found = strict(out / "stats.json")
    assert (found["windows"], found["window_tokens"], found["states"]) == (4, 100, 400)
    missing = set(stats.FIGURES) - set(found["figures"])
    assert missing == set(found["left_out"]) == {"decoder_bias"}
    assert all(f["definition"] and f["values"] for f in found["figures"].values())
    assert len(found["example"]["tokens"]) == 12
    names = {"sd", "correlations", "variance", "decoded", "how_soon", "cosine", "retention"}
    assert {p.stem for p in out.glob("*.png")} == names
    page = Page((out / "report.html").read_text())
    assert len(page.addresses) == len(names)
    assert all(a.startswith("data:image/png;base64,") for a in page.addresses)
    assert "http" not in re.sub(r"<title>.*?</title>", "", (out / "report.html").read_text())
    assert numbers(found) <= set(re.findall(r"-?[\d.]+(?:e[-+]\d+)?", page.text))
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    for name in ("stats.json", "report.html", "retention.png"):
        assert (tmp_path / "b" / name).read_bytes() == (out / name).read_bytes()


def test_no_display_no_home_no_network(model_dir, token_data, tmp_path):
    environment = {**ONE_THREAD, "HOME": "/nonexistent", "https_proxy": "http://127.0.0.1:9"}
    environment.pop("DISPLAY", None)
    command = ["analyze", "--model", model_dir(), "--data", str(token_data), "--out", "a", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "groundlm", *command],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "report.html").is_file()


@pytest.mark.parametrize("sizes", [{"num_heads": 0}, {"num_layers": 2}])
def test_other_gpns(model_dir, token_data, tmp_path, sizes):
    model, biased = model_dir(**sizes), model_dir("biased", decoder_bias=True, **sizes)
    out = str(tmp_path / "a")
    arguments = ["--model", model, "--data", str(token_data), "--out", out]
    assert main(["analyze", *arguments, *SMALL, "--against", biased]) == 0
    assert main(["ablate", *arguments, "--tokens", "60", "--window-tokens", "20"]) == 0
    found = strict(tmp_path / "a" / "stats.json")
    change = found["figures"]["decoder_bias"]["values"]
    assert change["norm"] == found["figures"]["mean_state"]["values"]["norm"]
    names = {row["name"] for row in strict(tmp_path / "a" / "ablate.json")["interventions"]}
    if "num_heads" in sizes:
        assert set(found["left_out"]) == {"memory_horizon", "write_strength"}
        assert "read_off" not in names
        assert "the model has no memory" in (tmp_path / "a" / "report.html").read_text()
    else:
        assert "1.read" in found["figures"]["budget"]["values"]
        assert {"read_off", "head_2_silenced", "reset_every_8"} <= names


def test_gated_delta_net_and_llama(model_dir, token_data, tmp_path, capsys):
    delta = build_model(
        {"model_type": "gated_delta_net", "vocab_size": 300, "hidden_size": 16,
         "intermediate_size": 24, "num_hidden_layers": 1, "linear_num_key_heads": 2,
         "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}, 0,
    )  # fmt: skip
    folder = model_dir("delta", delta)
    arguments = ["--model", folder, "--data", str(token_data), "--out", str(tmp_path / "a")]
    assert main(["analyze", *arguments, *SMALL]) == 0
    found = strict(tmp_path / "a" / "stats.json")
    assert found["figures"]["memory_horizon"]["values"]["heads"] == 2
    assert set(found["left_out"]) == {"mean_embedding", "decoder_bias", "gates", "budget"}
    assert found["example"] is None
    assert main(["ablate", *arguments]) == 2
    assert "taps need a gpn, this model is a gated_delta_net" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "states"), [("the", 1), ("the " * 300, 200), ("the state and memory", 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_degenerate_text(model_dir, tmp_path, text, states, dtype):
    """One token, constant text, fewer states than dimensions, bf16: finite numbers."""
    (tmp_path / "c.txt").write_text(text)
    out = tmp_path / "a"
    code = main(["analyze", "--model", model_dir(), "--text", str(tmp_path / "c.txt"), "--out",
                 str(out), "--dtype", dtype, "--states", str(states)])  # fmt: skip
    assert code == 0
    found = strict(out / "stats.json")
    assert found["states"] <= states
    if text == "the":
        assert found["figures"]["effective_ranks"]["values"]["stable_rank"] == 0
        assert found["left_out"]["state_horizon"] == "a window of one token has no lag"
    assert (out / "report.html").is_file()


def test_ablate_pairs_and_draws_the_report_anew(model_dir, token_data, tmp_path, capsys):
    write_documents(tmp_path / "l.jsonl", 5)
    out = tmp_path / "a"
    arguments = ["--model", model_dir(), "--data", str(token_data), "--out", str(out)]
    assert main(["analyze", *arguments, *SMALL]) == 0
    small = ["--tokens", "200", "--window-tokens", "40", "--only", "read_off", "head_*_silenced",
             "reset_every_*", "memory_*", "--resets", "1", "40", "--lambada-passages", "3",
             "--lambada", str(tmp_path / "l.jsonl")]  # fmt: skip
    assert main(["ablate", *arguments, *small]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == strict(out / "ablate.json")
    rows = {row["name"]: row for row in result["interventions"]}
    heads = [f"head_{h}_silenced" for h in range(3)]
    assert list(rows) == ["read_off", *heads, "reset_every_1"]  # the others need longer windows
    assert rows["reset_every_1"]["change_nats"] != 0
    assert rows["read_off"]["change_nats"] != 0
    assert rows["read_off"]["interval"][0] <= rows["read_off"]["change_nats"]
    assert result["lambada"]["passages"] == 3
    assert rows["read_off"]["lambada"]["paper"] != result["lambada"]["paper"]
    assert (result["windows"], result["tokens"]) == (5, 200)
    page = (out / "report.html").read_text()
    assert "What each part is worth" in page
    assert numbers(result) <= set(re.findall(r"-?[\d.]+(?:e[-+]\d+)?", Page(page).text))
    other = ["--model", model_dir("other"), *arguments[2:]]
    assert main(["analyze", *other, *SMALL]) == 0
    assert "What each part is worth" not in (out / "report.html").read_text()


def test_paired_change_and_its_interval():
    base = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    same = paired(base + 0.5, base)
    assert (same["change_nats"], same["interval"]) == (0.5, [0.5, 0.5])
    assert paired(base[:1], base[:1])["interval"] is None
    mixed = paired(base + np.array([[0.0], [1.0], [2.0]]), base)
    assert mixed["change_nats"] == 1
    assert mixed["interval"][0] < 1 < mixed["interval"][1]


def test_loss_by_context_bands_cover_all_tokens():
    bands = loss_by_context(np.tile(np.arange(1.0, 12), (2, 1)))
    assert [b["from"] for b in bands] == [*range(1, 9), 9, 11]
    assert bands[-1]["to"] == 11
    assert bands[-2] == {"from": 9, "to": 10, "nats": 9.5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze"], "give exactly one of --data and --text"),
        (["analyze", "--text", "missing.txt"], "missing.txt cannot be read"),
        (["analyze", "--states", "0", "--text", "t.txt"], "0 states in windows of 2048 tokens"),
        (["analyze", "--batch-size", "0", "--text", "t.txt"], "--batch-size must be at least 1"),
        (["ablate", "--text", "t.txt", "--only", "nothing"], "--only nothing matches none of"),
        (["ablate", "--text", "one.txt"], "the text has 1 token: scoring needs at least 2"),
        (["ablate", "--text", "t.txt", "--tokens", "0"], "--tokens"),
        (["ablate", "--text", "t.txt", "--lambada", "no.jsonl"], "no.jsonl does not exist"),
    ],
)
def test_refusals_leave_no_file(model_dir, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("the state reads the memory " * 5)
    Path("one.txt").write_text("t")
    command = [arguments[0], "--model", model_dir(), "--out", "a", *arguments[1:]]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not list(Path("a").glob("*"))


def test_nan_weights_and_strangers_are_refused(model_dir, token_data, tmp_path, capsys):
    model = GPNForCausalLM(tiny_config(vocab_size=300))
    with torch.no_grad():
        model.model.predict[0].ffn.down.weight.fill_(3e38)
        model.model.ground.token_proj.weight.fill_(3e38)
    folder = model_dir("huge", model)
    arguments = ["--data", str(token_data), "--out", str(tmp_path / "a")]
    assert main(["analyze", "--model", folder, *arguments, *SMALL]) == 2
    assert "finite" in capsys.readouterr().err
    small = model_dir("small", GPNForCausalLM(tiny_config(vocab_size=200)))
    assert main(["analyze", "--model", small, *arguments]) == 2
    assert "vocabulary" in capsys.readouterr().err


def test_default_folder_is_that_of_the_run(model_dir, token_data, tmp_path):
    model = model_dir("run/checkpoints/step-000001")
    assert main(["analyze", "--model", model, "--data", str(token_data), *SMALL]) == 0
    assert (tmp_path / "run" / "analysis" / "step-000001" / "report.html").is_file()


def test_numbers_for_readers():
    assert [number(x) for x in (None, 3, 16384, 0.0, 0.12345, 31.55, 2e-5, 123456.0)] == [
        "\N{EN DASH}", "3", "16,384", "0.000", "0.123", "31.6", "2.00e-05", "1.23e+05",
    ]  # fmt: skip
    assert number(0.25, signed=True) == "+0.250"


def test_rounding_refuses_what_is_not_finite():
    assert stats.rounded({"a": [1 / 3, 2, None, True]}) == {"a": [0.333333, 2, None, True]}
    with pytest.raises(ValueError, match="nan among the statistics"):
        stats.rounded([float("nan")])
