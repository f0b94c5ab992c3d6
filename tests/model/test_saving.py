"""Saving, loading, tying, dtypes, and every damage named in one line."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from groundlm import GPNConfig, GPNForCausalLM, GPNModel, GPNState, UserError
from groundlm.model.alignment import ALIGNMENT_BYTES
from groundlm.model.loading import load_model

WEIGHTS = "model.safetensors"


def tied(m: GPNForCausalLM) -> bool:
    """Whether the logits are taken with the matrix that the ids are looked up in, and no other."""
    predicted = m.model(torch.ones(1, 3, dtype=torch.int64)).last_hidden_state
    hidden = m.model.decoder_hidden(predicted)
    logits = m(torch.ones(1, 3, dtype=torch.int64)).logits
    return torch.allclose(logits, hidden @ m.get_input_embeddings().weight.T)


@pytest.mark.parametrize("shard", ["5GB", "2KB"])
def test_round_trip_keeps_every_value(m, ids, tmp_path, shard, caplog, monkeypatch):
    m.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    n, report = GPNForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values())
    assert "newly initialized" not in caplog.text
    for (name, a), (other, b) in zip(m.named_parameters(), n.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    x = ids(1, 9)
    n.eval()
    assert torch.equal(m(x).logits, n(x).logits)
    assert tied(n)
    assert n.config.tie_word_embeddings
    optimizer = torch.optim.SGD(n.parameters(), lr=0.1)
    n(x, labels=x).loss.backward()
    optimizer.step()
    assert tied(n)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    again = tmp_path / "again"
    GPNForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).save_pretrained(again)
    if shard == "5GB":
        assert (again / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


def test_auto_classes(m, ids, tmp_path):
    m.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), GPNConfig)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert isinstance(lm, GPNForCausalLM)
    assert lm.dtype == torch.float64
    x = ids(1, 5)
    assert torch.equal(lm(x).logits, m(x).logits)
    base = AutoModel.from_pretrained(tmp_path, dtype="auto").eval()
    assert isinstance(base, GPNModel)
    assert torch.equal(base(x).last_hidden_state, m.model(x).last_hidden_state)


def test_bf16_keeps_its_dtype_and_the_float32_tensors(m, ids, tmp_path):
    m.float().save_pretrained(tmp_path / "a")
    half = GPNForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16).eval()
    half.save_pretrained(tmp_path / "b")
    stored = load_file(tmp_path / "b" / WEIGHTS)
    for name, tensor in stored.items():
        keeps = any(part in name for part in ("norm", "bias", "A_log"))
        assert tensor.dtype == (torch.float32 if keeps else torch.bfloat16), name
    again = load_model(tmp_path / "b")
    assert again.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(half.named_parameters(), again.named_parameters(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    x = ids(1, 9)
    assert torch.equal(half(x).logits, again(x).logits)


@pytest.mark.parametrize("size", [61 + 6, 61 - 6])
def test_resizing_the_vocabulary_keeps_it_tied(m, ids, tmp_path, size):
    x = ids(2, 6) % 50
    before = m(x).logits
    m.resize_token_embeddings(size)
    assert tied(m)
    assert m.config.vocab_size == size
    after = m(x).logits
    assert after.shape[-1] == size
    kept = min(size, 61)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    m.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path)(x).logits, after)
    with pytest.raises(UserError, match=f"outside the vocabulary of {size}"):
        m(torch.full((1, 2), size))


def test_no_file_needs_pickle(m, tmp_path):
    m.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")  # never opened
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        load_model(tmp_path)


@pytest.fixture
def folder(tiny: Callable[..., GPNForCausalLM], tmp_path: Path) -> Path:
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("size", [0, 8, 2000, 0.9])
def test_cut_weights(folder, size):
    path = folder / WEIGHTS
    count = int(path.stat().st_size * size) if size == 0.9 else size
    os.truncate(path, count)
    check(folder, rf"model\.safetensors is damaged \({count} bytes\)")


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return apply


def configure(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


A_LOG = "model.memory.A_log"
DAMAGES = {
    rf"tensor {A_LOG} is missing": edit(lambda t: t.pop(A_LOG)),
    rf"tensor {A_LOG} has shape \(7,\), expected \(3,\)": edit(
        lambda t: t.update({A_LOG: torch.zeros(7)})
    ),
    "tensor model.extra belongs to no part": edit(
        lambda t: t.update({"model.extra": torch.zeros(1)})
    ),
    "tensor model.ground.gate.weight has 1 numbers that are not finite": edit(
        lambda t: t["model.ground.gate.weight"][0].__setitem__(3, float("nan"))
    ),
    "tensor model.embedding.weight has 2 numbers": edit(
        lambda t: t["model.embedding.weight"][4].__setitem__(slice(2), float("inf"))
    ),
    "model_type 'foo' is not known here": configure(model_type="foo"),
    "state_size is -3: it must be at least 1": configure(state_size=-3),
    "state_size.*expected int, got str": configure(state_size="wide"),
    "holds no weights of this llama": configure(model_type="llama"),
    "'t5' is no causal language model": configure(model_type="t5"),
    r"config\.json cannot be read": lambda f: (f / "config.json").write_text("{"),
    r"config\.json is missing": lambda f: [p.unlink() for p in f.iterdir()],
    r"model\.safetensors is missing": lambda f: (f / WEIGHTS).unlink(),
    "does not exist": shutil.rmtree,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_named(folder, message):
    DAMAGES[message](folder)
    check(folder, message)


def check(folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_damaged_shards(tiny, tmp_path):
    tiny(dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="2KB")
    load_model(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    os.truncate(shard, 100)
    check(tmp_path, f"{shard.name} is damaged")
    shard.unlink()
    check(tmp_path, f"{shard.name} is missing")


def test_other_causal_models_load_too(tmp_path):
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert isinstance(load_model(tmp_path, "bfloat16"), LlamaForCausalLM)
    with pytest.raises(UserError, match="unknown dtype 'half'"):
        load_model(tmp_path, "half")


def test_trainer_accumulates_like_the_unsplit_batch(m, ids, tmp_path):
    from transformers import Trainer, TrainingArguments

    x = ids(8, 12)
    y = x.clone()
    for i in range(8):
        y[i, : i + 2] = -100
    rows = [{"input_ids": a, "labels": b} for a, b in zip(x, y, strict=True)]
    start = {k: v.clone() for k, v in m.state_dict().items()}
    ends = []
    for batch in (8, 2):
        m.load_state_dict(start)
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=batch, max_steps=1,
            gradient_accumulation_steps=8 // batch, learning_rate=1e-2, optim="sgd",
            report_to=[], save_strategy="no", use_cpu=True, max_grad_norm=0,
        )  # fmt: skip
        Trainer(m, arguments, train_dataset=rows).train()
        ends.append({k: v.clone() for k, v in m.state_dict().items()})
    for name in start:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=1e-9)


def test_trainer_survives_a_batch_without_targets(m, ids, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": a, "labels": torch.full_like(a, -100)} for a in ids(4, 12)]
    start = {k: v.clone() for k, v in m.state_dict().items()}
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=1, optim="sgd", report_to=[],
        save_strategy="no", use_cpu=True,
    )  # fmt: skip
    Trainer(m, arguments, train_dataset=rows).train()
    for name, value in m.state_dict().items():
        assert torch.equal(value, start[name]), name


def test_loaded_tensors_are_aligned_like_new_ones(tiny, tmp_path):
    """MKL rounds by address: else a loaded model would not repeat the saved one to the bit."""
    model = tiny()
    model.save_pretrained(tmp_path)
    state = model(torch.randint(1, 61, (3, 9))).state
    state.save(tmp_path / "state.safetensors")
    loaded = [
        *GPNForCausalLM.from_pretrained(tmp_path).parameters(),
        *load_model(tmp_path).parameters(),
        *GPNState.load(tmp_path / "state.safetensors").tensors().values(),
    ]
    assert {tensor.data_ptr() % ALIGNMENT_BYTES for tensor in loaded} == {0}
    assert tied(GPNForCausalLM.from_pretrained(tmp_path))
