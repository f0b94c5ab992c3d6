"""The whole command on tiny models: files, order, resuming, sweep, faults, signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from groundlm.cli import main, parse, presets
from groundlm.comparison import command, scoring, training
from groundlm.comparison.command import run_compare
from groundlm.comparison.config import CompareConfig, ModelConfig, SweepConfig
from groundlm.comparison.matrix import make_run, settle_models
from groundlm.comparison.scoring import scores_path
from groundlm.data.windows import TokenSplit, TrainingWindows
from groundlm.errors import RunFault, UserError
from groundlm.evaluation import score
from groundlm.evaluation.command import EvalConfig, evaluate
from groundlm.model.loading import load_model
from groundlm.training import checkpoint as ckpt
from groundlm.training.loop import run_train
from helpers import GPN, LLAMA, ONE_THREAD, last_tensors, metrics

FILES = {"config.yaml", "loss_by_position.json", "loss_by_position.png", "loss_curves.json",
         "loss_curves.png", "results.json", "runs", "table.md"}  # fmt: skip


def results_of(config):
    return json.loads((Path(config.out) / "results.json").read_text())


def modified(folder):
    return {p: p.stat().st_mtime_ns for p in Path(folder).rglob("*.safetensors")}


def test_whole_table(compare_config, token_data, tmp_path, capsys):
    passages = tmp_path / "lambada.jsonl"
    passages.write_text('{"text": "the state memory reads"}\n{"text": "a token and writes"}\n')
    config = compare_config(lambada=str(passages))
    assert run_compare(config) == 0
    out = Path(config.out)
    assert {p.name for p in out.iterdir()} == FILES
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = results_of(config)
    assert last["table"] == results["table"]
    order = [(run["model"], run["seed"]) for run in results["runs"]]
    assert order == [("grounded", 1), ("deep", 1), ("grounded", 2), ("deep", 2)]
    manifest = json.loads((token_data / "manifest.json").read_text())
    for run in results["runs"]:
        assert run["tokens"] == results["tokens"] == 4 * 4 * 16
        assert abs(run["parameters"] / 8000 - 1) <= 0.01
        assert run["embedding_parameters"] + run["other_parameters"] == run["parameters"]
        assert run["heldout_tokens"] == manifest["splits"]["heldout"]["tokens"]
        assert run.keys() >= {"seconds", "tokens_per_s", "commit", "scored_with", "learning_rate"}
        assert run["scored_with"].keys() == {"heldout", "lambada"}
        low, high = run["perplexity_interval"]
        assert low < run["perplexity"] < high
        assert run["trained_with"].keys() >= {"hardware", "threads", "torch"}
        assert 0 <= run["lambada_paper_accuracy"] <= 1
    assert len({run["perplexity"] for run in results["runs"]}) == 4
    table = (out / "table.md").read_text()
    assert "4 of 4 runs finished" in table
    assert sum(line.startswith(("| grounded |", "| deep |")) for line in table.splitlines()) == 2
    positions = json.loads((out / "loss_by_position.json").read_text())
    assert {len(r["nats"]) for r in positions["runs"]} == {16}
    curves = json.loads((out / "loss_curves.json").read_text())["runs"]
    assert [c["tokens"] for c in curves] == [[64, 128, 192, 256]] * 4


def test_foreign_folder_is_not_touched(compare_config, tmp_path):
    out = tmp_path / "foreign"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and holds no comparison"):
        run_compare(compare_config(out=str(out)))
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_runs_and_scores_are_those_of_train_and_eval(compare_config, token_data, tmp_path):
    config = compare_config(seeds=[3])
    run_compare(config)
    run = results_of(config)["runs"][0]
    made = yaml.safe_load((Path(run["run"]) / "config.yaml").read_text())
    path = tmp_path / "same.yaml"
    path.write_text(yaml.safe_dump(made))
    assert main(["train", "--config", str(path), "--training.out", str(tmp_path / "same")]) == 0
    assert last_tensors(tmp_path / "same") == last_tensors(Path(run["run"]))
    scores = evaluate(EvalConfig(model=run["checkpoint"], data=str(token_data)))
    for name in ("perplexity", "bits_per_byte", "nats_per_token"):
        assert run[name] == pytest.approx(scores[name], rel=1e-6)


def test_done_runs_are_kept_and_models_and_seeds_can_be_added(compare_config, capsys):
    config = compare_config(seeds=[1])
    run_compare(config)
    first, written = results_of(config), modified(config.out)
    more = [
        *config.models,
        ModelConfig("bias", model=config.models[0].model | {"decoder_bias": True}),
    ]
    run_compare(compare_config(seeds=[1, 2], models=more))
    again = results_of(config)
    kept = [run for run in again["runs"] if run["seed"] == 1 and run["model"] != "bias"]
    assert kept == first["runs"]
    assert len(again["runs"]) == 6
    assert written.items() <= modified(config.out).items()


def test_part_of_the_models_alone(compare_config):
    entries = [replace(compare_config().models[0], learning_rate_of="deep"),
               replace(compare_config().models[1], learning_rate=2e-3)]  # fmt: skip
    config = compare_config(models=entries, only=["grounded"], seeds=[1])
    run_compare(config)
    (row,) = results_of(config)["table"]
    assert (row["model"], row["learning_rate"]) == ("grounded", 2e-3)
    assert row["perplexity"]["gap_percent"] is None
    run_compare(replace(config, only=[]))
    assert results_of(config)["table"][0]["perplexity"]["gap_percent"] is not None


def test_table_is_never_poorer_than_before(compare_config, monkeypatch):
    config = compare_config()
    run_compare(config)
    more = [ModelConfig("bias", model=config.models[0].model | {"decoder_bias": True}),
            *config.models]  # fmt: skip
    seen = []

    def look(run, split, launcher):
        seen.append([r["status"] for r in results_of(config)["runs"]])
        raise RunFault("no disk")

    monkeypatch.setattr(command, "train", look)
    assert run_compare(compare_config(models=more)) == 3
    assert seen[0] == ["missing", "finished", "finished"] * 2
    assert [r["status"] for r in results_of(config)["runs"]] == [
        "failed",
        "finished",
        "finished",
    ] * 2
    assert "bias with seed 1: no disk." in (Path(config.out) / "table.md").read_text()


def test_stopped_anywhere_it_goes_on_to_the_same_numbers(compare_config, tmp_path, monkeypatch):
    straight = compare_config(out=str(tmp_path / "straight"))
    run_compare(straight)
    config, calls = compare_config(), []
    real = ckpt.write

    def stop_after(*arguments):
        calls.append(arguments)
        done = real(*arguments)
        if len(calls) % 3 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(ckpt, "write", stop_after)
    codes = [run_compare(config) for _ in range(4)]
    assert codes[0] == 128 + signal.SIGTERM
    assert codes[-1] == 0
    for name in ("grounded-seed1", "deep-seed1", "grounded-seed2", "deep-seed2"):
        own, other = (Path(c.out) / "runs" / name for c in (config, straight))
        assert last_tensors(own) == last_tensors(other)
    same = ("model", "seed", "perplexity", "bits_per_byte", "tokens", "learning_rate")
    for own, other in zip(results_of(config)["runs"], results_of(straight)["runs"], strict=True):
        assert {k: own[k] for k in same} == {k: other[k] for k in same}


def test_changed_settings_are_refused_before_any_training(compare_config, monkeypatch):
    config = compare_config(seeds=[1])
    run_compare(config)
    monkeypatch.setattr(command, "train", lambda *_: pytest.fail("trained"))
    changed = replace(config.training, batch_size=5)
    with pytest.raises(UserError, match=r"training.batch_size = 4, not 5"):
        run_compare(compare_config(seeds=[1, 2], training=changed))


def test_sweep_takes_the_best_rate(compare_config):
    rates = [1e-6, 1e-2, 1e-5]
    config = compare_config(seeds=[1], sweep=SweepConfig(rates, steps=6))
    own = [replace(config.models[0], learning_rate=3e-3), config.models[1]]
    config = replace(config, models=own)
    assert run_compare(config) == 0
    grounded, deep = results_of(config)["table"]
    assert (grounded["learning_rate"], grounded["source"], grounded["sweep"]) == (3e-3, "own", None)
    assert (deep["learning_rate"], deep["source"]) == (1e-2, "sweep")
    tried = {t["learning_rate"]: t["unread_nats_per_token"] for t in deep["sweep"]["tried"]}
    assert list(tried) == sorted(rates)
    assert min(tried, key=tried.get) == 1e-2
    assert deep["sweep"]["at_edge"]
    runs = sorted(p.name for p in (Path(config.out) / "sweep").iterdir())
    assert [run.rpartition("-")[0] for run in runs[:3]] == [
        "deep-lr0.01",
        "deep-lr1e-05",
        "deep-lr1e-06",
    ]
    assert runs[3:] == ["deep.json"]
    assert metrics(Path(config.out) / "sweep" / runs[0])[-1]["step"] == 6
    assert run_compare(config) == 0
    assert results_of(config)["table"][1] == deep
    assert "the best lies at the edge" in (Path(config.out) / "table.md").read_text()


def test_rate_that_leaves_no_numbers_is_out(compare_config):
    """Fewer skipped steps than end a run: weights are finite, what they predict is not."""
    for rates in ([1e30, 1e-3], [1e-3, 1e30]):
        out = f"{compare_config().out}-{rates[0]:g}"
        config = compare_config(seeds=[1], sweep=SweepConfig(rates, steps=6), out=out)
        assert run_compare(config) == 0
        row = results_of(config)["table"][0]
        assert row["learning_rate"] == 1e-3
        assert [t["unread_nats_per_token"] for t in row["sweep"]["tried"]][1] is None


def test_rate_that_differs_from_a_finished_run_ends_nothing_but_that(compare_config):
    config = compare_config(seeds=[1], sweep=SweepConfig([1e-4], steps=6))
    config = replace(
        config, models=[config.models[0], replace(config.models[1], learning_rate=1e-3)]
    )
    run_compare(config)
    more = replace(config, sweep=SweepConfig([1e-4, 1e-2], steps=6), seeds=[1, 2])
    assert run_compare(more) == 3
    runs = results_of(more)["runs"]
    assert "trained with optimizer.learning_rate = 0.0001, not 0.01" in runs[0]["fault"]
    assert "choose another --out" in runs[0]["fault"]
    assert [run["status"] for run in runs] == ["failed", "finished", "finished", "finished"]


def test_other_settings_of_a_later_run_are_refused_before_any_training(compare_config, monkeypatch):
    config = compare_config(seeds=[1])
    run_compare(config)
    no_training(monkeypatch)
    changed = replace(config, models=[
        ModelConfig("new", model=GPN), config.models[0],
        replace(config.models[1], optimizer={"beta1": 0.8}),
    ])  # fmt: skip
    with pytest.raises(UserError, match=r"beta1 = 0.9, not 0.8: compare it unchanged or choose"):
        run_compare(changed)


def test_short_runs_may_be_deleted_and_share_a_folder_with_others(
    compare_config, tmp_path, monkeypatch
):
    sweep = SweepConfig([1e-3, 1e-2], steps=6, out=str(tmp_path / "rates"))
    config = compare_config(seeds=[1], sweep=sweep)
    run_compare(config)
    other = replace(config, seeds=[2], out=str(tmp_path / "other"))
    assert run_compare(other) == 0  # short runs of another seed lie beside
    assert len(list((tmp_path / "rates").glob("deep-lr*"))) == 4
    for folder in (tmp_path / "rates").glob("*-lr*"):
        shutil.rmtree(folder)
    no_training(monkeypatch)
    for again in (config, other):
        table = results_of(again)["table"]
        assert run_compare(again) == 0
        assert results_of(again)["table"] == table
    (tmp_path / "rates" / "deep.json").write_text('{"mine": 1}')
    assert run_compare(config) == 3
    assert "deep.json does not hold what a sweep gave" in results_of(config)["runs"][1]["fault"]
    assert (tmp_path / "rates" / "deep.json").read_text() == '{"mine": 1}'


def test_scored_run_is_not_trained_again_for_want_of_its_last_checkpoint(
    compare_config, monkeypatch
):
    config = compare_config(seeds=[1])
    config = replace(config, training=replace(config.training, keep_checkpoints=2))
    run_compare(config)
    before = results_of(config)["table"]
    for run in (Path(config.out) / "runs").iterdir():
        shutil.rmtree(run / "checkpoints" / "step-000004")
        assert (run / "checkpoints" / "step-000002").is_dir()
    no_training(monkeypatch)
    assert run_compare(config) == 0
    assert results_of(config)["table"] == before


def test_run_without_its_metrics_has_no_curve(compare_config):
    config = compare_config(seeds=[1])
    run_compare(config)
    (Path(config.out) / "runs" / "deep-seed1" / "metrics.jsonl").unlink()
    assert run_compare(config) == 0
    curves = json.loads((Path(config.out) / "loss_curves.json").read_text())["runs"]
    assert [curve["model"] for curve in curves] == ["grounded"]


def no_training(monkeypatch):
    monkeypatch.setattr(training, "run_train", lambda config: pytest.fail(config.training.out))


def test_rate_that_diverges_is_out_for_good(compare_config, monkeypatch):
    config = compare_config(seeds=[1], sweep=SweepConfig([1e30, 1e-3], steps=4))
    config = replace(config, training=replace(config.training, max_skipped_steps=2))
    assert run_compare(config) == 0
    results = results_of(config)
    for row in results["table"]:
        assert row["learning_rate"] == 1e-3
        tried = {t["learning_rate"]: t["unread_nats_per_token"] for t in row["sweep"]["tried"]}
        assert tried[1e30] is None
        assert tried[1e-3] < 7
    no_training(monkeypatch)
    assert run_compare(config) == 0
    assert results_of(config) == results


def test_model_that_no_rate_serves_ends_nothing_but_itself(compare_config, monkeypatch):
    config = compare_config(seeds=[1], sweep=SweepConfig([1e30, 2e30], steps=4))
    config = replace(
        config,
        training=replace(config.training, max_skipped_steps=2),
        models=[config.models[0], replace(config.models[1], learning_rate=1e-3)],
    )
    assert run_compare(config) == 3
    grounded, deep = results_of(config)["runs"]
    assert grounded["fault"] == "no learning rate of the sweep gives a finite loss (1e+30, 2e+30)"
    assert deep["status"] == "finished"
    no_training(monkeypatch)
    assert run_compare(config) == 3


def test_fault_of_a_short_run_is_not_taken_for_divergence(compare_config, monkeypatch):
    config = compare_config(seeds=[1], sweep=SweepConfig([1e-2, 1e-3], steps=4))

    def fail(config):
        if "deep-lr0.01" in config.training.out:
            raise RunFault("disk full")
        return run_train(config)

    monkeypatch.setattr(training, "run_train", fail)
    assert run_compare(config) == 3
    grounded, deep = results_of(config)["runs"]
    assert (grounded["status"], deep["status"], deep["fault"]) == (
        "finished",
        "failed",
        "disk full",
    )
    monkeypatch.setattr(training, "run_train", run_train)
    assert run_compare(config) == 0
    assert len(results_of(config)["table"][1]["sweep"]["tried"]) == 2


def test_sweep_goes_on_beyond_its_edge_and_is_shared(compare_config, tmp_path, monkeypatch):
    sweep = SweepConfig([1e-5, 1e-4], steps=6, extend=2, out=str(tmp_path / "rates"))
    config = compare_config(seeds=[1], sweep=sweep)
    entries = [config.models[0], replace(config.models[1], learning_rate_of="grounded")]
    config = replace(config, models=entries)
    assert run_compare(config) == 0
    grounded, deep = results_of(config)["table"]
    assert [t["learning_rate"] for t in grounded["sweep"]["tried"]] == [1e-5, 1e-4, 1e-3, 1e-2]
    assert (deep["learning_rate"], deep["source"]) == (grounded["learning_rate"], "grounded")
    assert "- deep: learning rate of grounded." in (Path(config.out) / "table.md").read_text()
    trained = []

    def note(config):
        trained.append(Path(config.training.out).name)
        return run_train(config)

    monkeypatch.setattr(training, "run_train", note)
    longer = replace(config.training, steps=5)
    assert run_compare(replace(config, out=str(tmp_path / "longer"), training=longer)) == 0
    assert trained == ["grounded-seed1", "deep-seed1"]


def test_rates_are_chosen_on_training_windows_that_short_runs_do_not_read(compare_config):
    config = compare_config(seeds=[1], sweep=SweepConfig([1e-2], steps=6, windows=10))
    run_compare(config)
    row = results_of(config)["table"][0]
    (nats,) = [t["unread_nats_per_token"] for t in row["sweep"]["tried"]]
    split = TokenSplit.open(config.data.path, "train")
    windows = TrainingWindows(split, 16, 4, 1)
    read = {windows.window_at(i) for i in range(6 * 4)}
    last = windows.num_windows // 4
    chosen = [windows.window_at(i) for i in range(4 * (last - 3), 4 * last)]
    assert not read & set(chosen)
    assert row["sweep"]["windows"] == 12  # whole batches
    (short,) = (Path(config.out) / "sweep").glob("grounded-lr0.01-*")
    model = load_model(ckpt.newest_whole(short, print))
    each = [score(model, split.read(16 * w, 17), 16)[0] / 16 for w in chosen]
    assert nats == pytest.approx(sum(each) / len(each), rel=1e-5)
    config = replace(config, sweep=replace(config.sweep, steps=last - 2))
    with pytest.raises(UserError, match=rf"sweep.steps is {last - 2}: with 3 more"):
        run_compare(config)


def test_damaged_checkpoint_ends_nothing_but_its_run(compare_config):
    config = compare_config(seeds=[1])
    run_compare(config)
    run = Path(config.out) / "runs" / "grounded-seed1"
    shutil.rmtree(run / "eval")
    for path in run.rglob("model.safetensors"):
        path.write_bytes(b"")
    assert run_compare(config) == 3
    grounded, deep = results_of(config)["runs"]
    assert "holds no undamaged checkpoint" in grounded["fault"]
    assert deep["status"] == "finished"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "content", ["[]", "{}", "{", '{"trained": []}', '{"trained": {"step": 4}}']
)
def test_damaged_scores_are_made_anew(content, whole, compare_config):
    config = compare_config(seeds=[1])
    run_compare(config)
    before = results_of(config)["runs"]
    path = scores_path(Path(before[0]["run"]))
    path.write_text(content)
    if not whole:  # no checkpoint either: the run is made anew, too
        shutil.rmtree(Path(before[0]["run"]) / "checkpoints")
    assert run_compare(config) == 0
    after = results_of(config)["runs"]
    for old, new in zip(before, after, strict=True):
        assert old["perplexity"] == new["perplexity"]
        assert old["tokens"] == new["tokens"]


def test_parts_of_the_scores_are_made_anew_each_when_its_own_cause_changes(
    compare_config, tmp_path, monkeypatch
):
    config = compare_config(seeds=[1])
    run_compare(config)
    made = []
    for part in ("heldout", "lambada"):
        scorer = scoring._SCORERS[part]
        monkeypatch.setitem(
            scoring._SCORERS, part, lambda *a, p=part, s=scorer: made.append(p) or s(*a)
        )
    assert run_compare(config) == 0
    assert made == []
    passages = tmp_path / "lambada.jsonl"
    passages.write_text('{"text": "the state memory reads"}\n')
    config = replace(config, lambada=str(passages))
    assert run_compare(config) == 0
    assert made == ["lambada", "lambada"]
    made.clear()
    (Path(config.out) / "runs" / "deep-seed1" / "eval" / "compare.lambada.jsonl").unlink()
    assert run_compare(config) == 0
    assert made == ["lambada"]
    made.clear()
    run = Path(config.out) / "runs" / "deep-seed1"
    perplexity = results_of(config)["runs"][1]["perplexity"]
    shutil.move(run / "eval", tmp_path / "eval")
    shutil.rmtree(run)
    split = TokenSplit.open(config.data.path, "train")
    model = settle_models(config, split.vocab_size)[1]
    training_run = make_run(config, model, 1, 1e-2)
    run_train(training_run.train)  # the same run, at another time: another checkpoint
    shutil.move(tmp_path / "eval", run / "eval")
    assert run_compare(config) == 0
    assert made == ["heldout", "lambada"]
    assert results_of(config)["runs"][1]["perplexity"] == perplexity


def test_scored_runs_need_no_checkpoints(compare_config, tmp_path, monkeypatch):
    config = compare_config()
    run_compare(config)
    before = results_of(config)
    for folder in Path(config.out).glob("runs/*/checkpoints"):
        shutil.rmtree(folder)
    no_training(monkeypatch)
    assert run_compare(config) == 0
    after = results_of(config)
    assert {run["checkpoint"] for run in after["runs"]} == {None}
    assert after["table"] == before["table"]
    passages = tmp_path / "lambada.jsonl"
    passages.write_text('{"text": "the state memory reads"}\n')
    assert run_compare(replace(config, lambada=str(passages))) == 3
    run = results_of(config)["runs"][0]
    assert "its checkpoint is gone" in run["fault"]
    assert run["perplexity"] == before["runs"][0]["perplexity"]  # what is known stays in the table
    assert "its checkpoint is gone" in (Path(config.out) / "table.md").read_text()
    changed = replace(config, optimizer=replace(config.optimizer, warmup_steps=1))
    with pytest.raises(UserError, match="warmup_steps = 2, not 1"):
        run_compare(changed)


def test_scores_that_are_no_numbers_end_nothing_but_their_run(compare_config, monkeypatch):
    config = compare_config(seeds=[1])

    def broken(model, trained, exam, path):
        if "grounded" in str(path):
            model.get_input_embeddings().weight.data[:] = float("nan")
        return scorer(model, trained, exam, path)

    scorer = scoring._SCORERS["heldout"]
    monkeypatch.setitem(scoring._SCORERS, "heldout", broken)
    assert run_compare(config) == 3
    grounded, deep = results_of(config)["runs"]
    assert deep["fault"] is None
    assert "grounded-seed1 cannot be scored" in grounded["fault"]
    assert "not finite" in grounded["fault"]
    assert deep["status"] == "finished"


def test_models_have_options_of_their_own(compare_config):
    config = compare_config(seeds=[1])
    carried = replace(config.models[0], name="carried", training={"carry_state": True},
                      optimizer={"name": "muon", "beta2": 0.9})  # fmt: skip
    config = replace(config, models=[*config.models, carried])
    assert run_compare(config) == 0
    grounded, _, row = results_of(config)["table"]
    assert grounded["options"] == {}
    assert row["options"] == {"optimizer": {"name": "muon", "beta2": 0.9},
                              "training": {"carry_state": True}}  # fmt: skip
    made = yaml.safe_load((Path(config.out) / "runs" / "carried-seed1" / "config.yaml").read_text())
    assert (made["optimizer"]["name"], made["training"]["carry_state"]) == ("muon", True)
    table = (Path(config.out) / "table.md").read_text()
    assert (
        "- carried: optimizer.name muon, optimizer.beta2 0.9, training.carry_state True." in table
    )


def test_documents_apart_in_training_are_apart_in_scoring(compare_config):
    config = compare_config(seeds=[1])
    data = replace(config.data, reset_at_documents=True)
    with pytest.raises(UserError, match=r"deep: data.reset_at_documents is True: a model of type"):
        run_compare(replace(config, data=data))
    config = replace(config, data=data, models=config.models[:1], reference="grounded")
    run_compare(config)
    run = results_of(config)["runs"][0]
    followed, ignored = (
        evaluate(EvalConfig(model=run["checkpoint"], data=config.data.path, reset_at_documents=x))
        for x in (None, False)
    )
    assert (
        followed["state"]
        == "reset at windows and at documents, each read after the one token before it"
    )
    assert run["perplexity"] == pytest.approx(followed["perplexity"], rel=1e-9)
    assert run["perplexity"] != pytest.approx(ignored["perplexity"], rel=1e-5)


def test_launcher_trains_in_another_process(compare_config):
    config = compare_config(seeds=[1], launcher=[sys.executable, "-m", "groundlm"])
    config = replace(config, models=config.models[1:])
    assert run_compare(config) == 0
    assert results_of(config)["runs"][0]["tokens"] == 256
    missing = replace(config, out=f"{config.out}-2", launcher=["no-such-program"])
    with pytest.raises(UserError, match="launcher no-such-program cannot be started"):
        run_compare(missing)


@pytest.mark.parametrize("code", [2, 3, 1, 0])
def test_launcher_that_fails(code, compare_config):
    launcher = [sys.executable, "-S", "-c", f"raise SystemExit({code})"]
    config = compare_config(seeds=[1], launcher=launcher)
    run, split = only_run(config)
    with pytest.raises(RunFault):
        training.train(run, split, launcher)


def test_launcher_is_handed_a_signal_once(compare_config, tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "counted = pathlib.Path(sys.argv[0]).with_name('counted')\n"
        "def count(*_):\n"
        "    counted.write_text(counted.read_text() + 'x')\n"
        "signal.signal(signal.SIGINT, count)\n"
        "counted.write_text('')\n"
        "while not counted.read_text(): time.sleep(0.05)\n"
        "time.sleep(0.6)\n"
        "sys.exit(1)\n"
    )
    run, split = only_run(compare_config(seeds=[1]))
    counted = tmp_path / "counted"

    def interrupt():
        while not counted.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(training.Interrupted) as caught:
        training.train(run, split, [sys.executable, "-S", str(script)])
    thread.join()
    assert caught.value.number == signal.SIGINT
    assert counted.read_text() == "x"


def only_run(config):
    split = TokenSplit.open(config.data.path, "train")
    model = settle_models(config, split.vocab_size)[0]
    return make_run(config, model, 1, 1e-3), split


def test_signal_ends_the_command_with_a_run_that_goes_on(compare_config, tmp_path):
    config = compare_config(seeds=[1])
    long = replace(config.training, steps=100_000, eval_every=0)
    config = replace(config, training=long)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(asdict(config)))
    start = [sys.executable, "-m", "groundlm", "compare", str(path)]
    process = subprocess.Popen(start, env=ONE_THREAD, stderr=subprocess.PIPE, text=True)
    run = Path(config.out) / "runs" / "grounded-seed1"
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or not metrics(run):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert "the same command goes on" in process.stderr.read()
    assert ckpt.newest_whole(run, print) is not None


def own(**values):
    return ModelConfig("deep", **{"model": LLAMA} | values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": []}, "models names nothing"),
        ({"reference": "dep"}, "did you mean deep?"),
        ({"only": ["grounded", "dep"]}, "only: 'dep' is none of the models (did you mean deep?)"),
        ({"seeds": [1, 1]}, "give one or several, each once"),
        ({"seeds": []}, "give one or several"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"target_parameters": 100}, "grounded: a gpn cannot have 100 parameters"),
        ({"eval_batch_size": 0}, "eval_batch_size is 0"),
        ({"sweep": SweepConfig([1e-3, -1.0])}, "learning rate -1.0"),
        ({"sweep": SweepConfig([1e-3, 1e-3])}, "give each once"),
        ({"sweep": SweepConfig([1e-3], 0)}, "sweep.steps is 0"),
        ({"models": [ModelConfig("a b")]}, "'a b' is no name"),
        ({"models": [ModelConfig("deep"), ModelConfig("deep")]}, "deep is there 2 times"),
        ({"models": [ModelConfig("deep", preset="lama")]}, "deep: no preset or file 'lama'"),
        ({"lambada": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"lambada": "no/where.txt"}, "LAMBADA file no/where.txt does not exist"),
        ({"prepare": {"out": "x"}}, "prepare.out is not for a comparison: set data.path"),
        ({"sweep": SweepConfig([1e-3], windows=0)}, "sweep.windows is 0"),
        ({"sweep": SweepConfig([1e-3], extend=1)}, "sweep.extend needs two"),
        ({"models": [own(training={"steps": 3})]}, "deep: training.steps is not a model's own"),
        ({"models": [own(training={"carry_stat": 1})]}, "did you mean training.carry_state?"),
        ({"models": [own(training={"carry_state": "x"})]}, "deep: training.carry_state: "),
        ({"models": [own(optimizer={"name": "mun"})]}, "expected one of 'adamw', 'muon', got mun"),
        (
            {"models": [own(model={"model_type": "mamba2"}, optimizer={"name": "muon"})]},
            "holds several matrices in one tensor",
        ),
        ({"models": [own(training={"carry_state": True})]}, "a model of type llama has no state"),
        ({"models": [own(optimizer={"learning_rate": 1.0})]}, "set its learning_rate"),
        ({"models": [own(learning_rate_of="x")]}, "deep: learning_rate_of 'x' is no model"),
        ({"models": [own(learning_rate_of="deep")]}, "deep: learning_rate_of deep, which has"),
        ({"models": [own(learning_rate_of="deep", learning_rate=1.0)]}, "deep has both"),
        (
            {"models": [own(model=LLAMA | {"max_position_embeddings": 8})]},
            "deep: data.window_tokens is 16: the model reads at most 8",
        ),
    ],
)
def test_bad_settings_are_refused(change, message, compare_config):
    config = compare_config(**change)
    with pytest.raises(UserError) as caught:
        run_compare(config)
    assert message in str(caught.value)
    assert not Path(config.out).exists()


@pytest.mark.parametrize("field", ["out", "seed", "stop_at"])
def test_what_the_comparison_sets_itself_is_refused(field, compare_config):
    changed = replace(compare_config().training, **{field: 7 if field != "out" else "x"})
    with pytest.raises(UserError, match=rf"training.{field} is not for a comparison"):
        run_compare(compare_config(training=changed))


def test_data_is_prepared_where_there_is_none(compare_config, tmp_path, capsys):
    from helpers import write_documents

    write_documents(tmp_path / "new.jsonl", 60)
    config = compare_config(seeds=[1], target_parameters=None)
    data = replace(config.data, path=str(tmp_path / "new"))
    options = {"input": [str(tmp_path / "new.jsonl")], "tokenizer": "train:290",
               "heldout_share": 0.2}  # fmt: skip
    config = replace(config, data=data, prepare=options)
    with pytest.raises(UserError, match="did you mean tokenizer"):
        run_compare(replace(config, prepare={"tokeniser": "x"}))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    unfit = replace(config.models[1], preset="lama")
    for change in ({"out": str(foreign)}, {"models": [unfit]}, {"lambada": "nowhere.jsonl"},
                   {"out": str(foreign / "thesis.txt")}):  # fmt: skip
        with pytest.raises(UserError):
            run_compare(replace(config, **change))
        assert not (tmp_path / "new").exists()
    assert run_compare(config) == 0
    assert TokenSplit.open(tmp_path / "new", "train").vocab_size <= 290
    assert "used as is" not in capsys.readouterr().err
    assert run_compare(replace(config, prepare=options | {"heldout_share": 0.3})) == 0
    assert "was not made as prepare says (heldout_share): used as is" in capsys.readouterr().err


def test_command_line_errors_are_one_line(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    for text, message in {
        "models: [{nam: x}]": "unknown key nam (did you mean name?)",
        "models: [{name: x, training: 3}]": "models: training: expected dict, got 3",
        "models: 3": "",
        "{}": "",
    }.items():
        path.write_text(f"{text}\nreference: x" if text != "{}" else "reference: x")
        assert main(["compare", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
    assert main(["compare", "smoke", "--seeds", "[]"]) == 2
    assert "seeds is []" in capsys.readouterr().err
    assert main(["compare", "smok"]) == 2
    assert "did you mean smoke?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smoke", "small", "paper"])
@pytest.mark.parametrize("form", ["{}", "presets/compare/{}.yaml"])
def test_shipped_comparisons_parse_and_match(name, form):
    assert set(presets("compare")) == {"smoke", "small", "paper"}
    arguments = ["--config", form.format(name)]
    config = parse(CompareConfig, arguments, "compare", True, "compare")
    config.check()
    assert config.reference == "transformer"
    if form == "{}":
        vocabulary = {"smoke": 1024, "small": 2048, "paper": 32000}[name]
        models = settle_models(config, vocabulary)
        for model in models:
            assert abs(model.parameters["total"] / config.target_parameters - 1) <= 0.01
        tokens = config.training.steps * config.training.batch_size * config.data.window_tokens
        assert tokens == {"smoke": 61_440, "small": 10_002_432, "paper": 2_621_440_000}[name]
