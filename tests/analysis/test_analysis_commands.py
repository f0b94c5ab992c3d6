"""`groundlm analyze` and `groundlm ablate` on tiny models: files, degenerate text, refusals."""

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from groundlm import GPNForCausalLM, UserError
from groundlm.analysis import interventions as act
from groundlm.analysis import stats
from groundlm.analysis.ablate import paired, paired_lambada, window_nats
from groundlm.analysis.attribution import attribute_reads
from groundlm.analysis.collect import sample_windows
from groundlm.analysis.horizons import memory_horizons, retention
from groundlm.analysis.report import in_words, number
from groundlm.analysis.taps import listening
from groundlm.cli import main
from groundlm.data.windows import TokenSplit
from groundlm.evaluation.record import git_commit
from groundlm.model.loading import load_model
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
    assert found["commit"] == git_commit()
    assert {"groundlm", "torch"} <= set(found["versions"])
    missing = set(stats.FIGURES) - set(found["figures"])
    assert missing == {"decoder_bias"}
    assert set(found["left_out"]) == {"decoder_bias", "lags"}
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
        assert set(found["left_out"]) == {"memory_horizon", "write_strength", "lags"}
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
    left_out = {"mean_embedding", "decoder_bias", "gates", "budget", "lags"}
    assert set(found["left_out"]) == left_out
    definition = found["figures"]["state_norm"]["definition"]
    assert definition == "Norm of x over all positions of the text."
    assert found["state"].startswith("x is the last layer's output, before the norm")
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
    assert set(result["left_out"]) == {"reset_every_40", "after 64 tokens"}
    assert result["lambada"]["passages"] == 3
    assert rows["read_off"]["lambada"]["paper"].keys() >= {"accuracy_change", "interval"}
    assert (result["windows"], result["tokens"]) == (5, 200)
    page = (out / "report.html").read_text()
    assert "What each part is worth" in page
    assert numbers(result) <= set(re.findall(r"-?[\d.]+(?:e[-+]\d+)?", Page(page).text))
    assert (out / "since_reset.png").is_file()
    other = ["--model", model_dir("other", seed=4), *arguments[2:]]
    assert main(["analyze", *other, *SMALL]) == 0
    page = (out / "report.html").read_text()
    assert "What each part is worth" not in page
    assert "it is of another model: run ablate again" in page
    assert not (out / "since_reset.png").exists()
    assert main(["ablate", *other, *small]) == 0
    assert "What each part is worth" in (out / "report.html").read_text()
    renamed = ["--model", f"{other[1]}/.", *arguments[2:]]
    assert main(["ablate", *renamed, *small]) == 0  # the same weights by another name
    assert "What each part is worth" in (out / "report.html").read_text()
    (tmp_path / "t.txt").write_text("the state reads the memory " * 60)
    text = [*other[:2], "--text", str(tmp_path / "t.txt"), "--out", str(out)]
    assert main(["analyze", *text, *SMALL]) == 0
    assert "it is of another text" in (out / "report.html").read_text()


def test_rows_of_the_ablation_are_those_of_the_interventions(model_dir, token_data, tmp_path):
    """Means, horizons and s-bar taken here from plain passes, each change entered by hand."""
    folder, out = model_dir(), tmp_path / "a"
    arguments = ["--tokens", "320", "--window-tokens", "40", "--after-tokens", "9", "--resets", "6"]
    assert main(["ablate", "--model", folder, "--data", str(token_data), "--out", str(out),
                 *arguments]) == 0  # fmt: skip
    result = strict(out / "ablate.json")
    rows = {row["name"]: row for row in result["interventions"]}
    model = load_model(folder)
    ids = sample_windows(TokenSplit.open(token_data, "heldout"), 8 * 41, 41)
    kept = {}
    with torch.no_grad(), listening(model, "*", lambda at, x: kept.setdefault(at, []).append(x)):
        states = model.model(torch.from_numpy(ids)).last_hidden_state
        memory = model(torch.from_numpy(ids[-1:, -9:])).state.memory_BHKV[0]
    base = window_nats(model, ids, 8)
    assert result["nats_per_token"] == pytest.approx(base.mean(), abs=2e-6)

    def mean(place):  # of the first pass, 41 tokens long
        return torch.stack(kept[place][:41]).double().mean((0, 1)).numpy()

    decay = mean("write.log_decay")
    sbar = states.double().mean((0, 1)).numpy()
    horizons = memory_horizons(retention(torch.stack(kept["write.log_decay"][:41], 1).numpy()))
    fast = [h for h, x in enumerate(horizons["horizon_tokens"]) if x is not None and x < 4]
    slow = [h for h in range(3) if h not in fast]
    expected = {
        "sbar_projected_out": (act.project_out(model, sbar), 0),
        "sbar_zero": (act.subtract(model, sbar), 0),
        "ffn_mean": (act.fix(model, {"predict.0.ffn": mean("predict.0.ffn")}), 0),
        "ground_gate_mean": (act.fix(model, {"ground.gate": mean("ground.gate")}), 0),
        "read_off": (act.read_off(model), 0),
        "keys_shuffled": (act.shuffle_keys(model), 0),
        "write_off": (act.write_off(model, 9), 9),
        "memory_frozen": (act.freeze_memory(model, 9), 9),
        "memory_swapped": (act.swap_memory(model, 9, memory.numpy()), 8),
        "reset_every_6": (act.reset_every(model, 6), 6),
    }
    pools = {f"head_{h}": [h] for h in range(3)} | {"fast_pool": fast, "slow_pool": slow}
    for name, heads in pools.items():
        if heads:
            expected[f"{name}_silenced"] = act.silence_heads(model, heads), 0
            expected[f"{name}_decay_mean"] = act.clamp_decay(model, heads, decay), 0
    assert rows.keys() == expected.keys()
    for name, (enter, first) in expected.items():
        with enter:
            change = (window_nats(model, ids, 8) - base)[:, first:]
        assert rows[name]["change_nats"] == pytest.approx(change.mean(), abs=2e-5), name
        assert (window_nats(model, ids, 8) == base).all()
        before = rows[name].get("from_token", 0)
        assert before == first, name


def test_every_figure_from_plain_numpy(model_dir, token_data, tmp_path):
    folder, out = model_dir(), tmp_path / "a"
    biased = model_dir("biased", decoder_bias=True)
    assert main(["analyze", "--model", folder, "--data", str(token_data), "--out", str(out),
                 "--against", biased, *SMALL]) == 0  # fmt: skip
    found = strict(out / "stats.json")
    values = {name: figure["values"] for name, figure in found["figures"].items()}
    curves, model = found["curves"], load_model(folder)
    ids = sample_windows(TokenSplit.open(token_data, "heldout"), 400, 100)
    kept = {}
    with torch.no_grad(), listening(model, "*", lambda at, x: kept.setdefault(at, []).append(x)):
        o = model.model(torch.from_numpy(ids)).last_hidden_state.double().numpy()
        logits = model(torch.from_numpy(ids)).logits[0].double()
        other = load_model(biased).model(torch.from_numpy(ids)).last_hidden_state.double().numpy()
    x, sbar = o.reshape(400, -1), o.mean((0, 1))

    def same(name, key, value):
        assert values[name][key] == pytest.approx(value, rel=2e-4, abs=2e-6), (name, key)

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    norms = np.linalg.norm(x, axis=1)
    same("state_norm", "mean", norms.mean())
    same("state_norm", "sd", norms.std())
    sd = x.std(0)
    for key, value in (("min", sd.min()), ("median", np.median(sd)), ("max", sd.max())):
        same("dimension_sd", key, value)
    off = np.abs(np.corrcoef(x.T)[~np.eye(20, dtype=bool)])
    same("correlations", "mean_absolute", off.mean())
    same("correlations", "max_absolute", off.max())
    variance = np.linalg.svd(x - sbar, compute_uv=False) ** 2
    shares = np.cumsum(variance) / variance.sum()
    for percent in (50, 90, 99):
        same("components", f"for_{percent}_percent", int((shares < percent / 100).sum()) + 1)
    same("effective_ranks", "stable_rank", variance.sum() / variance.max())
    same("effective_ranks", "participation_ratio", variance.sum() ** 2 / (variance**2).sum())
    same("mean_state", "norm", np.linalg.norm(sbar))
    same("mean_state", "share_of_mean_norm", np.linalg.norm(sbar) / norms.mean())
    top = np.linalg.svd(x, full_matrices=False)[2][0]
    same("mean_state", "cosine_with_top_direction", abs(cosine(top, sbar)))
    same("mean_state", "share_of_second_moment", sbar @ sbar / (x**2).sum(1).mean())
    parts = [part.mean(0) for part in np.split(x, 8)]
    pairs = [cosine(a, b) for a, b in itertools.combinations(parts, 2)]
    for key, value in (("mean", np.mean(pairs)), ("sd", np.std(pairs)), ("min", min(pairs))):
        same("mean_stability", key, value)
    w = {k: v.double().numpy() for k, v in model.model.state_dict().items()}

    def rms(v, weight):
        return v / np.sqrt((v**2).mean() + model.model.norm_eps) * w[weight]

    def decode(state):
        return w["embedding.weight"] @ (w["decode.proj.weight"] @ rms(state, "decode.norm.weight"))

    scores = decode(sbar)
    best = list(np.argsort(-scores)[:10])
    assert values["mean_decoded"]["top_ids"] == best == curves["decoded"]["ids"]
    probability = np.exp(scores - scores.max())
    np.testing.assert_allclose(
        curves["decoded"]["probability"], (probability / probability.sum())[best], rtol=1e-3
    )
    counts = TokenSplit.open(token_data, "train").unigram_counts()
    ranks = [rankdata(v) for v in (scores, counts)]
    same("mean_decoded", "spearman", np.corrcoef(*ranks)[0, 1])
    token = w["ground.token_proj.weight"] @ rms(
        w["embedding.weight"].mean(0), "ground.token_norm.weight"
    )
    embedded = list(np.argsort(-decode(token))[:10])
    assert values["mean_embedding"]["top_ids"] == embedded
    same("mean_embedding", "shared_of_top", len(set(best) & set(embedded)))
    same("mean_embedding", "cosine", cosine(token, sbar))
    running = np.cumsum(o, 1) / np.arange(1, 101)[None, :, None]
    rest = [np.delete(o, n, 0).mean((0, 1)) for n in range(4)]
    soon = np.mean([[cosine(v, rest[n]) for v in running[n]] for n in range(4)], 0)
    for t in (1, 10, 100):
        same("how_soon", f"after_{t}", soon[t - 1])
    theirs = np.linalg.norm(other.mean((0, 1)))
    same("decoder_bias", "norm_against", theirs)
    same("decoder_bias", "change", theirs / np.linalg.norm(sbar) - 1)
    for name, states in (("raw", o), ("centred", o - o.mean(1, keepdims=True))):
        unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
        for lag in (1, 64):
            value = (unit[:, :-lag] * unit[:, lag:]).sum(-1).mean()
            assert curves["cosine"][name][curves["cosine"]["lags"].index(lag)] == pytest.approx(
                value, rel=1e-4, abs=1e-6
            )
            same("state_horizon", f"{name}_at_{lag}", value)
    stacked = {place: torch.stack(x[:100]).double() for place, x in kept.items()}
    gamma = stacked["write.log_decay"].numpy()  # [T, N, H]
    for lag in (1, 5, curves["retention"]["lags"][-1]):
        left = np.mean(
            [np.exp(gamma[start : start + lag].sum(0)) for start in range(100 - lag + 1)], (0, 1)
        )
        place = curves["retention"]["lags"].index(lag)
        np.testing.assert_allclose([r[place] for r in curves["retention"]["retention"]], left,
                                   rtol=1e-4)  # fmt: skip
    beta = stacked["write.beta"].mean((0, 1))
    for head in range(3):
        same("write_strength", f"head_{head}", float(beta[head]))
    for gate in ("ground.gate", "predict.0.gate"):
        same("gates", gate, float(stacked[gate].mean()))
    rest_sum = stacked["predict.0.rest"] - stacked["predict.0.ffn"]
    for name, x in (("carried", rest_sum), ("ffn", stacked["predict.0.ffn"]),
                    ("read", stacked["predict.0.read"])):  # fmt: skip
        same("budget", f"0.{name}", float(x.norm(dim=-1).mean()))
    tokens = found["example"]["tokens"]
    assert len(tokens) == 12
    logs = logits.log_softmax(-1)
    for t in (1, 7, 11):
        expected = -float(logs[t - 1, ids[0, t]])
        assert tokens[t]["surprisal_nats"] == pytest.approx(expected, rel=1e-4)
        gates = tokens[t]["openness"]
        assert gates["ground.gate"] == pytest.approx(float(stacked["ground.gate"][t, 0].mean()),
                                                     rel=1e-4)  # fmt: skip
    read = found["example"]["reads"][-1]
    parts = attribute_reads(model, ids[0, :12], [11])
    assert read["logit_from_reads"] == pytest.approx(parts.effect_PTH.sum(), rel=1e-3)
    for source in read["sources"]:
        effect = parts.effect_PTH[0, source["position"]].sum()
        assert source["logit"] == pytest.approx(effect, rel=1e-3, abs=1e-6)


class Cells(HTMLParser):
    """Rows of the tables of a page, each a list of the texts of its cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()


def test_tables_of_the_report_show_the_numbers(model_dir, token_data, tmp_path):
    out = tmp_path / "a"
    arguments = ["--model", model_dir(), "--data", str(token_data), "--out", str(out)]
    assert main(["analyze", *arguments, *SMALL]) == 0
    assert main(["ablate", *arguments, "--tokens", "200", "--window-tokens", "40"]) == 0
    found, ablation = strict(out / "stats.json"), strict(out / "ablate.json")
    rows = {row[0]: row for row in Cells((out / "report.html").read_text()).rows if row}
    for figure in found["figures"].values():
        title = f"{figure['title']} {figure['definition']}"
        for label, text in in_words(figure["values"]):
            assert " ".join(f"{label} {text}".split()) in " ".join(rows[title][1].split())
        assert rows[title][2] == figure.get("paper", "\N{EN DASH}")
    for row in ablation["interventions"]:
        cells = rows[row["name"].replace("_", " ")]
        assert cells[1:4] == [
            row["what"],
            f"{row['change_nats']:+.4f}",
            "{:+.4f} to {:+.4f}".format(*row["interval"]),
        ]


@pytest.mark.parametrize("command", ["analyze", "ablate"])
def test_files_of_others_are_not_touched(model_dir, token_data, tmp_path, capsys, command):
    arguments = ["--model", model_dir(), "--data", str(token_data)]
    for name, content in (("report.html", "mine"), ("sd.png", "mine"), ("stats.json", '{"a": 1}'),
                          ("ablate.json", "[]"), ("stats.json", "x")):  # fmt: skip
        out = tmp_path / f"{name}-{len(content)}"
        out.mkdir()
        (out / name).write_text(content)
        assert main([command, *arguments, "--out", str(out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert [(p.name, p.read_text()) for p in out.iterdir()] == [(name, content)]
    assert main([command, "--model", str(tmp_path / "no"), "--data", str(token_data), "--out",
                 str(tmp_path / "new")]) == 2  # fmt: skip
    assert not (tmp_path / "new").exists()


def test_a_padded_vocabulary_names_no_token_that_is_not_there(model_dir, token_data, tmp_path):
    model = GPNForCausalLM(tiny_config(vocab_size=400))
    with torch.no_grad():
        model.model.embedding.weight[300:] *= 100
    out = tmp_path / "a"
    assert main(["analyze", "--model", model_dir("padded", model), "--data", str(token_data),
                 "--out", str(out), *SMALL]) == 0  # fmt: skip
    figures = strict(out / "stats.json")["figures"]
    for name in ("mean_decoded", "mean_embedding"):
        assert max(figures[name]["values"]["top_ids"]) < 300


def test_paired_change_and_its_interval():
    base = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    same = paired(base + 0.5, base)
    assert (same["change_nats"], same["interval"]) == (0.5, [0.5, 0.5])
    assert paired(base[:1], base[:1])["interval"] is None
    mixed = paired(base + np.array([[0.0], [1.0], [2.0]]), base)
    assert mixed["change_nats"] == 1
    assert mixed["interval"][0] < 1 < mixed["interval"][1]


def test_change_that_begins_at_some_token_counts_from_there():
    base = np.zeros((2, 7))
    nats = np.array([[9, 9, 9, 1, 2, 3, 4.0], [9, 9, 9, 3, 4, 5, 6]])
    row = paired(nats, base, first=3)
    assert (row["from_token"], row["change_nats"], row["interval"]) == (3, 3.5, [2.5, 4.5])
    since = [(b["from"], b["to"], b["change_nats"]) for b in row["by_tokens_since"]]
    assert since == [(1, 1, 2.0), (2, 2, 3.0), (3, 3, 4.0), (4, 4, 5.0)]
    row = paired(nats, base, first=3, period=3)
    since = [(b["from"], b["to"], b["change_nats"]) for b in row["by_tokens_since"]]
    assert since == [(1, 1, (1 + 4 + 3 + 6) / 4), (2, 2, 3.0), (3, 3, 4.0)]
    assert "by_tokens_since" not in paired(nats, base)


def test_change_in_lambada_is_paired():
    def scores(log_likelihoods, tops):
        items = [
            {"log_likelihood": x, "subwords": n, "first_is_top": top, "all_are_top": False}
            for x, n, top in zip(log_likelihoods, (1, 3), tops, strict=True)
        ]
        return {"items": items, "paper": {"accuracy": 0, "perplexity": 1}, "lm_eval": {}}

    found = paired_lambada(scores([-2, -6], [1, 0]), scores([-1, -1], [1, 1]))
    assert found["paper"]["accuracy_change"] == -0.5
    assert found["paper"]["change_nats"] == (1 + 5) / 4
    assert found["lm_eval"]["change_nats"] == (1 + 5) / 2
    assert found["lm_eval"]["accuracy_change"] == 0
    low, high = found["lm_eval"]["interval"]
    assert (low, high) == (1, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze"], "give exactly one of --data and --text"),
        (["analyze", "--text", "missing.txt"], "missing.txt cannot be read"),
        (["analyze", "--states", "0", "--text", "t.txt"], "0 states in windows of 2048 tokens"),
        (["analyze", "--batch-size", "0", "--text", "t.txt"], "--batch-size must be at least 1"),
        (["ablate", "--text", "t.txt", "--only", "nothing"], "--only nothing matches none of"),
        (["ablate", "--text", "one.txt"], "the text has 1 token: scoring needs at least 2"),
        (["ablate", "--text", "t.txt", "--tokens", "0"], "--tokens is 0"),
        (["ablate", "--text", "t.txt", "--resets", "8", "0"], "--resets has 0"),
        (["ablate", "--text", "t.txt", "--after-tokens", "-1"], "--after-tokens is -1"),
        (["ablate", "--text", "t.txt", "--lambada-passages", "-2"], "--lambada-passages is -2"),
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
    assert not Path("a").exists()


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
    with pytest.raises(UserError, match=r"a b is nan: the model's values are too large"):
        stats.rounded({"a": {"b": [float("nan")]}})
