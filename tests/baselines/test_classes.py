"""Baselines are transformers' classes: same forward, and what we do with models works on them."""

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from groundlm.baselines.gated_delta_net import GatedDeltaNetConfig
from groundlm.errors import UserError
from groundlm.evaluation.perplexity import token_nats
from groundlm.evaluation.scoring import is_recurrent, read
from groundlm.model.loading import load_model
from groundlm.models import build_config, build_model

OWN = {"llama": LlamaForCausalLM, "mamba2": Mamba2ForCausalLM}


def untouched(model):
    """The transformers class itself, with the model's weights."""
    kind = model.config.model_type
    if kind in OWN:
        assert type(model) is OWN[kind]
        theirs = OWN[kind](model.config)
    else:
        values = model.config.to_dict()
        kept = {k: v for k, v in values.items() if k in Qwen3NextConfig().to_dict()}
        theirs = Qwen3NextForCausalLM(Qwen3NextConfig(**kept | {"model_type": "qwen3_next"}))
    theirs.load_state_dict(model.state_dict())
    return theirs.eval()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_forward_is_that_of_the_transformers_class(model, length):
    ids_BT = torch.randint(0, 61, (3, length))
    expected = untouched(model)(input_ids=ids_BT, use_cache=False).logits
    assert torch.equal(model(input_ids=ids_BT, use_cache=False).logits, expected)


def test_gradients_are_those_of_the_transformers_class(model):
    ids_BT = torch.randint(0, 61, (2, 17))
    theirs = untouched(model).train()
    for m in (model.train(), theirs):
        m(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    for (name, own), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None, name
        assert torch.equal(own.grad, other.grad), name


def test_nats_are_those_of_the_models_own_logits(model):
    ids_BT, targets_BT = torch.randint(0, 61, (2, 2, 19))
    logits = model(input_ids=ids_BT, use_cache=False).logits.log_softmax(-1)
    expected = -logits.gather(-1, targets_BT[..., None])[..., 0]
    torch.testing.assert_close(token_nats(model, ids_BT, targets_BT), expected)


def test_padding_on_the_left_changes_nothing(model):
    ids_BT = torch.randint(0, 61, (2, 12))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :5] = 0
    batch = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    alone = model(input_ids=ids_BT[1:, 5:], use_cache=False).logits
    torch.testing.assert_close(batch[1:, 5:], alone, atol=1e-5, rtol=1e-5)


def test_greedy_text_is_the_same_alone_padded_and_without_cache(model):
    ids_BT = torch.randint(0, 61, (2, 9))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    both = model.generate(ids_BT, attention_mask=mask_BT, **options)[:, 9:]
    alone = model.generate(ids_BT[1:, 4:], attention_mask=mask_BT[1:, 4:], **options)[:, 5:]
    plain = model.generate(ids_BT[1:, 4:], attention_mask=mask_BT[1:, 4:], use_cache=False,
                           **options)[:, 5:]  # fmt: skip
    assert both.shape == (2, 12)
    assert torch.equal(both[1:], alone)
    assert torch.equal(alone, plain)


@pytest.mark.parametrize("sizes", ["gated_delta_net", "mamba2"], indirect=True)
def test_state_is_carried_over_a_cut(model):
    assert is_recurrent(model)
    ids_BT = torch.randint(0, 61, (2, 30))
    whole, _ = read(model, ids_BT)
    parts, cache = [], None
    for first, last in ((0, 1), (1, 9), (9, 10), (10, 30)):
        part, cache = read(model, ids_BT[:, first:last], cache, keep_cache=True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_saved_and_loaded_is_the_same_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32")
    assert type(loaded) is type(model)
    ids_BT = torch.randint(0, 61, (2, 9))
    assert torch.equal(loaded(input_ids=ids_BT).logits, model(input_ids=ids_BT).logits)
    tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings


def test_gated_delta_net_does_not_attend_and_starts_remembering():
    sizes = {"model_type": "gated_delta_net", "linear_num_key_heads": 64,
             "linear_num_value_heads": 64, "hidden_size": 8, "intermediate_size": 8,
             "linear_key_head_dim": 2, "linear_value_head_dim": 2, "num_hidden_layers": 2,
             "vocab_size": 9}  # fmt: skip
    model = build_model(sizes, seed=1)
    names = dict(model.named_parameters())
    assert not any("self_attn" in name or "expert" in name for name in names)
    for layer in model.model.layers:
        dt = torch.nn.functional.softplus(layer.linear_attn.dt_bias.detach())
        assert float(dt.min()) >= 0.99e-3
        assert float(dt.max()) <= 1.01e-1
        assert 0.005 < float(dt.log().mean().exp()) < 0.02  # log-uniform: 0.01 in the middle
        retention = torch.exp(-layer.linear_attn.A_log.exp() * dt)
        assert float((retention > 0.9).float().mean()) > 0.3


def test_papers_gated_delta_net_has_its_memory():
    config = GatedDeltaNetConfig()
    assert config.memory_cells == 1_966_080
    assert config.layer_types == ["linear_attention"] * 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_experts": 4}, "num_experts is 4"),
        ({"hiden_size": 4}, "did you mean model.hidden_size?"),
    ],
)
def test_other_layers_are_refused(wrong, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        build_config({"model_type": "gated_delta_net", "num_hidden_layers": 1} | wrong)
