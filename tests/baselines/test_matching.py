"""The parameter matcher, on the meta device."""

import pytest

from groundlm.baselines.matching import FREE_WIDTHS, match_parameters
from groundlm.cli import parse, presets
from groundlm.errors import UserError
from groundlm.models import count_parameters
from groundlm.training.config import TrainConfig

FAMILIES = {"130m": 129_151_902, "xs": 1_266_312}


def sizes_of(preset):
    return parse(TrainConfig, ["--config", preset], "train", uses_presets=True).model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    ["transformer", "gated-deltanet", "gated-deltanet-1l", "mamba2", "mamba2-1l", "gpn-m-2l", "gpn",
     "gpn-m-1l-bias", "gpn-m-1l"],
)  # fmt: skip
def test_every_model_of_a_family_meets_its_target(family, name):
    target = FAMILIES[family]
    sizes = match_parameters(sizes_of(f"{name}-{family}"), target)
    assert abs(count_parameters(sizes)["total"] / target - 1) <= 0.01
    changed = {k for k in sizes if sizes[k] != sizes_of(f"{name}-{family}").get(k)}
    assert changed <= {FREE_WIDTHS[sizes["model_type"]]}


def test_presets_were_matched_already_but_for_those_that_the_paper_fixes():
    fixed_by_the_paper = {"gpn-m-2l-130m", "gpn-130m"}
    for name in presets():
        family = name.rpartition("-")[2]
        if family in FAMILIES and name not in fixed_by_the_paper:
            assert match_parameters(sizes_of(name), FAMILIES[family]) == sizes_of(name), name


@pytest.mark.parametrize("name", ["transformer", "gated-deltanet", "mamba2", "gpn-m-1l"])
@pytest.mark.parametrize("target", [1_500_000, 3_000_001])
def test_free_width_meets_other_targets(name, target):
    sizes = match_parameters(sizes_of(f"{name}-xs"), target)
    assert abs(count_parameters(sizes)["total"] / target - 1) <= 0.01
    assert sizes[FREE_WIDTHS[sizes["model_type"]]] % 8 == 0


def test_one_by_one_where_eights_are_too_coarse():
    base = {"model_type": "llama", "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    target = count_parameters(base | {"intermediate_size": 13})["total"]
    assert match_parameters(base, target, tolerance=0.001)["intermediate_size"] == 13


def test_another_size_can_be_free():
    sizes = sizes_of("mamba2-xs")
    target = count_parameters(sizes | {"num_hidden_layers": 17})["total"]
    matched = match_parameters(sizes, target, "num_hidden_layers", tolerance=0.001)
    assert matched == sizes | {"num_hidden_layers": 17}


def test_untied_head_counts_as_embedding():
    sizes = {"model_type": "llama", "vocab_size": 10, "hidden_size": 6, "num_attention_heads": 2,
             "num_hidden_layers": 1, "intermediate_size": 8}  # fmt: skip
    tied = count_parameters(sizes | {"tie_word_embeddings": True})
    untied = count_parameters(sizes | {"tie_word_embeddings": False})
    assert (tied["embedding"], untied["embedding"]) == (60, 120)
    assert tied["rest"] == untied["rest"] == tied["total"] - 60 == untied["total"] - 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 1000}, r"cannot have 1,000 parameters within 1.0% by its intermediate_size: 1"),
        ({"target": 10**6, "free": "ffn_size"}, "have no size ffn_size"),
        ({"target": 10**6, "free": "max_position_embeddings"}, "does not change the parameters"),
    ],
)
def test_what_cannot_be_met_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        match_parameters(sizes_of("transformer-xs") | {"num_hidden_layers": 2}, **arguments)


def test_type_without_a_known_width_asks_for_one():
    with pytest.raises(UserError, match="no free width is known for models of type gpt2"):
        match_parameters({"model_type": "gpt2"}, 10)
