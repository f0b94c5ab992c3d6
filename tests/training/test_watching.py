"""Trackers by name, and the plot of runs."""

import sys
import types

import pytest

from groundlm import UserError
from groundlm.cli import main
from groundlm.training.loop import run_train
from groundlm.training.plot import average, draw, read_metrics
from helpers import losses


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_online_trackers_get_every_record_once(train_config, monkeypatch, package):
    calls = []
    fake = types.ModuleType(package)
    fake.init = lambda **k: calls.append(("init", k))
    fake.log = lambda values, step: calls.append((step, values))
    fake.finish = lambda: calls.append(("finish", None))
    monkeypatch.setitem(sys.modules, package, fake)
    run_train(train_config(training__log=package, training__steps=3))
    assert calls[0][0] == "init"
    assert calls[0][1]["config"]["training"]["steps"] == 3
    assert [c[0] for c in calls[1:]] == [1, 2, 3, 3, "finish"]  # the last 3 is the held-out loss
    assert calls[1][1]["loss_nats"] > 0


def test_a_continued_run_has_one_identifier(train_config, monkeypatch):
    found = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **k: found.append(k["id"])
    fake.log = lambda values, step: None
    fake.finish = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for stop in (2, 4):
        run_train(train_config(training__log="wandb", training__stop_at=stop))
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_failing_tracker_ends_its_records_only(train_config, monkeypatch, tmp_path, capsys):
    fake = types.ModuleType("trackio")
    fake.init = lambda **k: None

    def log(values, step):
        if step == 2:
            raise ConnectionError("no route")

    fake.log, fake.finish = log, lambda: None
    monkeypatch.setitem(sys.modules, "trackio", fake)
    assert run_train(train_config(training__log="trackio"))["step"] == 10
    assert "no more records go to the tracker: no route" in capsys.readouterr().err
    assert len(losses(tmp_path / "run")) == 10


def test_tensorboard_gets_scalars(train_config, monkeypatch):
    scalars = []

    class Writer:
        def __init__(self, folder):
            assert folder.endswith("tensorboard")

        def add_scalar(self, name, value, step):
            scalars.append((name, step))

        def close(self):
            scalars.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    run_train(train_config(training__log="tensorboard", training__steps=2))
    assert ("grad_norm", 2) in scalars
    assert scalars[-1] == "closed"


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_missing_package_is_named_before_training(train_config, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs a package: pip install {package}"):
        run_train(train_config(training__log=package))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_plot_of_several_runs(train_config, tmp_path, capsys):
    run_train(train_config("a", training__eval_every=5))
    run_train(train_config("b", model__num_heads=0))
    for suffix, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        out = tmp_path / f"x{suffix}"
        runs = [str(tmp_path / "a"), str(tmp_path / "b")]
        assert main(["plot", "--run", *runs, "--out", str(out), "--smooth", "2"]) == 0
        assert out.read_bytes().startswith(head)
    figure = draw({"a": read_metrics(tmp_path / "a"), "b": read_metrics(tmp_path / "b")})
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[:2] == ["loss", "learning rate"]
    assert "memory effect" in titles
    loss = figure.axes[0].lines
    assert [len(line.get_xdata()) for line in loss] == [10, 2, 10, 1]
    assert list(loss[1].get_xdata()) == [5 * 64, 10 * 64]


def test_average_of_groups():
    assert average([1, 2, 3, 4, 5], 2) == [1.5, 3.5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "{tmp}/none"], "no metrics in"),
        (["--run", "{tmp}", "--out", "x.bmp"], "choose one of .png"),
        (["--run"], "names nothing"),
        (["--run", "{tmp}/none", "--smooth", "0"], "smooth is 0"),
    ],
)
def test_bad_plots(arguments, message, tmp_path, capsys):
    assert main(["plot", *[a.format(tmp=tmp_path) for a in arguments]]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
