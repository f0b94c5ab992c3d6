"""lm-evaluation-harness and our own scores on the same file."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from passages import PASSAGES, answered_right, write_passages

from groundlm.data.tokenizer import load_tokenizer
from groundlm.evaluation import score_lambada
from groundlm.model.loading import load_model

pytest.importorskip("lm_eval", reason="the harness is an extra: pip install 'groundlm[harness]'")

ROUNDING = 1e-4
"""Nats: both score in float32, in batches of other shapes."""
DOCS = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.fixture
def task_folder(tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    passages = write_passages(tmp_path / "passages.jsonl")
    (task,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    task = task.replace("lambada_test.jsonl", str(passages))
    # White space after the last word, which one passage has, is dropped by us and not by the task.
    (folder / "task.yaml").write_text(task.replace("text.split", "text.rstrip().split"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


def run_task(folder, model, **arguments):
    """The harness's scores of the local task, and (log-likelihood, top choice) by passage."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["lambada_local"],
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    samples = sorted(results["samples"]["lambada_local"], key=lambda sample: sample["doc_id"])
    return results["results"]["lambada_local"], [tuple(s["filtered_resps"][0]) for s in samples]


@pytest.fixture
def model_folder(model, token_data, tmp_path):
    """The float32 model with a tokenizer whose BOS is its EOS."""
    folder = tmp_path / "model"
    model.float().save_pretrained(folder)
    load_tokenizer(str(token_data / "tokenizer")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "arguments"), [("groundlm", {}), ("hf", {"add_bos_token": True})])
def test_harness_gives_our_numbers(model_folder, task_folder, name, arguments):
    """C33, by the harness on the same file."""
    import groundlm.evaluation.harness  # noqa: F401 - registers the model

    model, tokenizer = load_model(model_folder, "float32"), load_tokenizer(str(model_folder))
    passages = [*PASSAGES, *answered_right(model, tokenizer)]
    write_passages(task_folder.parent / "passages.jsonl", passages)
    ours = score_lambada(model, tokenizer, passages)
    theirs, samples = run_task(task_folder, name, pretrained=str(model_folder), **arguments)
    assert theirs["acc,none"] == ours["lm_eval"]["accuracy"] > 0
    assert math.log(theirs["perplexity,none"]) == pytest.approx(
        math.log(ours["lm_eval"]["perplexity"]), abs=ROUNDING
    )
    for (log_likelihood, is_greedy), item in zip(samples, ours["items"], strict=True):
        assert float(log_likelihood) == pytest.approx(item["log_likelihood"], abs=ROUNDING)
        assert str(is_greedy) == str(item["all_are_top"])


def test_rolling_and_generation(checkpoint):
    from lm_eval.api.instance import Instance

    from groundlm.evaluation import score
    from groundlm.evaluation.harness import HarnessModel

    model = HarnessModel(str(checkpoint), batch_size="auto")

    def request(kind, *arguments):
        return Instance(kind, {}, arguments, 0)

    texts = ["the state reads a token", "", "again"]
    rolled = model.loglikelihood_rolling([request("loglikelihood_rolling", t) for t in texts])
    expected = [-score(model.model, model.encoder.encode(t), window=99, prefix=0)[0] for t in texts]
    assert rolled == pytest.approx(expected, abs=1e-4)
    options = {"max_gen_toks": 12, "do_sample": False}
    free = model.generate_until([request("generate_until", text, options) for text in PASSAGES])
    context, text = next(x for x in zip(PASSAGES, free, strict=True) if len(x[1]) > 4)
    options["until"] = [stop := text[2:4]]
    assert model.generate_until([request("generate_until", context, options)]) == [
        text.split(stop)[0]
    ]


def test_command_line_of_the_harness_knows_our_models(checkpoint, task_folder, tmp_path):
    command = [
        sys.executable, "-m", "groundlm.evaluation.harness", "--model", "hf", "--model_args",
        f"pretrained={checkpoint}", "--tasks", "lambada_local", "--include_path",
        str(task_folder), "--device", "cpu", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "out").rglob("results*.json")
    assert "lambada_local" in json.loads(result.read_text())["results"]
