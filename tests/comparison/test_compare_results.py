"""Means, spreads, gaps, positions and figures, by hand."""

import math

import numpy as np
import pytest

from groundlm.comparison.plots import banded
from groundlm.comparison.results import summarise
from groundlm.comparison.table import markdown


def run(model, seed, perplexity, status="finished"):
    figures = {"perplexity": perplexity, "fault": None}
    return {"model": model, "seed": seed, "status": status} | figures


def model(name):
    return {"model": name, "layers": 1, "parameters": 30, "embedding_parameters": 10,
            "other_parameters": 20, "learning_rate": 1e-3, "source": "own",
            "sweep": None, "options": {}}  # fmt: skip


def test_gap_is_as_the_paper_gives_it():
    runs = [run("grounded", 1, 18.06), run("deep", 1, 16.05)]
    row, reference = summarise([model("grounded"), model("deep")], runs, "deep")
    assert row["perplexity"]["gap_percent"] == pytest.approx(12.5234, abs=1e-4)
    assert (row["perplexity"]["sd"], row["perplexity"]["gap_sd"]) == (None, None)
    assert reference["perplexity"]["gap_percent"] == 0


def test_means_and_spreads_are_over_finished_seeds_and_gaps_over_shared_ones():
    runs = [run("a", 1, 20.0), run("a", 2, 30.0), run("a", 3, 40.0), run("r", 1, 10.0),
            run("r", 3, 16.0), run("r", 2, 99.0, "failed")]  # fmt: skip
    row = summarise([model("a")], runs, "r")[0]
    assert row["seeds"] == [1, 2, 3]
    assert row["perplexity"] == {
        "mean": 30.0,
        "sd": 10.0,
        "n": 3,
        "gap_percent": pytest.approx((100 + 150) / 2),
        "gap_sd": pytest.approx(50 / math.sqrt(2)),
    }
    assert "lambada_paper_accuracy" not in row


def test_no_gap_before_the_reference_has_run():
    row = summarise([model("a")], [run("a", 1, 2.0)], "r")[0]
    assert row["perplexity"]["gap_percent"] is None


def test_a_seed_without_a_number_leaves_no_mean():
    runs = [run("a", 1, 20.0), run("a", 2, None), run("r", 1, 10.0), run("r", 2, 10.0)]
    row, reference = summarise([model("a"), model("r")], runs, "r")
    assert row["perplexity"] == {
        "mean": None, "sd": None, "n": 2, "gap_percent": None, "gap_sd": None
    }  # fmt: skip
    assert reference["perplexity"]["gap_percent"] == 0
    backwards = summarise([model("r")], runs, "a")[0]["perplexity"]
    assert (backwards["mean"], backwards["gap_percent"]) == (10.0, -50.0)


def test_bands_cover_every_position_once():
    nats = list(np.arange(100.0))
    centres, means = banded(nats)
    assert means[:3] == [0, 1, 2]
    assert centres[0] == 1
    assert [c - 1 for c in centres] == pytest.approx(means)  # nats here are the positions
    assert means[-1] == 97.5  # positions 96 to 99


def test_table_shows_what_is_missing_and_what_failed():
    runs = [run("a", 1, 20.0), {"model": "r", "seed": 1, "status": "failed", "fault": "disk full"}]
    info = {"tokens": 50, "documents": 2, "utf8_bytes": 90}
    results = {
        "name": "tiny", "reference": "r", "seeds": [1], "steps": 2, "batch_size": 3, "tokens": 60,
        "data": {"window_tokens": 10, "vocab_size": 9, "train": info, "heldout": info},
        "lambada": None, "runs": runs, "commit": None, "versions": {"torch": "2"},
        "table": summarise([model("a"), model("r")], runs, "r"),
    }  # fmt: skip
    lines = markdown(results).splitlines()
    assert "1 of 2 runs finished" in lines[2]
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[1].startswith("| a | 1 | 30 | 10 | 20 | 0.001 | 1 | 20.00 | - |")
    assert rows[2].startswith("| r | 1 | 30 | 10 | 20 | 0.001 | 0 | - | - |")
    assert len({row.count("|") for row in rows}) == 1
    assert "r with seed 1: disk full." in "\n".join(lines)
