"""`groundlm bench generate` on sizes of milliseconds."""

import json
import time

import pytest
import torch

from groundlm import GPNForCausalLM, UserError
from groundlm.benchmark import generate as bench
from groundlm.benchmark.generate import BenchGenerateConfig, bench_generate, read_seconds
from groundlm.models import count_parameters

TINY = (
    {"vocab_size": 64, "state_size": 16, "embedding_size": 8, "ffn_size": 24, "num_heads": 2,
     "head_k_dim": 4, "head_v_dim": 4},
    {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
     "intermediate_size": 24},
)  # fmt: skip


@pytest.mark.parametrize("size", bench.SIZES)
def test_both_models_are_of_equal_size(size):
    gpn, llama = bench.SIZES[size]
    counts = [
        count_parameters(gpn)["total"],
        count_parameters(llama | {"model_type": "llama", "tie_word_embeddings": True})["total"],
    ]
    assert abs(counts[0] - counts[1]) < 0.005 * counts[0]


def test_table_and_last_line(monkeypatch, capsys):
    monkeypatch.setitem(bench.SIZES, "3m", TINY)
    config = BenchGenerateConfig(
        size="3m", contexts=[3, 20], batch_sizes=[1, 2], dtypes=["float32"], new_tokens=4,
        long_context=40,
    )  # fmt: skip
    result = bench_generate(config)
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == result
    rows = result["rows"]
    assert len(rows) == 9  # two models, two contexts, two batch sizes, and the long context
    gpn = [r for r in rows if r["model"] == "gpn"]
    llama = [r for r in rows if r["model"] == "llama"]
    assert {r["carried_bytes"] / r["batch"] for r in gpn} == {gpn[0]["carried_bytes"]}
    assert llama[0]["carried_bytes"] < llama[-1]["carried_bytes"]
    assert [r["context_tokens"] for r in gpn] == [3, 20, 40, 3, 20]
    assert all(r["ms_per_token"] > 0 and r["share_of_memory_bound"] > 0 for r in rows)
    result = bench_generate(
        BenchGenerateConfig(
            size="3m", contexts=[3], batch_sizes=[1], dtypes=["float32"], new_tokens=2,
            long_context=10**7, long_context_limit_s=0.01,
        )
    )  # fmt: skip
    assert "10000000 tokens would take" in result["skipped"][0]


def test_nothing_is_measured_cold(monkeypatch):
    """The start of a process must decide neither a speed nor whether the long context fits."""
    monkeypatch.setitem(bench.SIZES, "3m", TINY)
    plain = GPNForCausalLM.forward
    calls = []

    def slow_at_first(self, *args, **kwargs):
        calls.append(self)
        time.sleep(0.5 if calls.count(self) <= 2 else 0)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GPNForCausalLM, "forward", slow_at_first)
    result = bench_generate(
        BenchGenerateConfig(
            size="3m", contexts=[3], batch_sizes=[1], dtypes=["float32"], new_tokens=2,
            long_context=40, long_context_limit_s=1.0,
        )
    )  # fmt: skip
    assert result["skipped"] == []
    gpn = [r for r in result["rows"] if r["model"] == "gpn"]
    assert [r["context_tokens"] for r in gpn] == [3, 40]
    assert all(r["prompt_tokens_per_s"] > 12 for r in gpn)


def test_reading_is_timed_in_seconds():
    assert 1e-7 < read_seconds(1 << 20, torch.device("cpu")) < 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "9b"}, "size is '9b'"),
        ({"contexts": []}, "contexts is empty"),
        ({"batch_sizes": [0]}, "batch_sizes holds 0"),
        ({"dtypes": ["int8"]}, "dtypes holds 'int8'"),
        ({"new_tokens": 1}, "new_tokens is 1"),
        ({"long_context": -5}, "long_context is -5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(UserError, match=message):
        BenchGenerateConfig(**values)
