"""Every shipped configuration parses, builds, and has the parameters it claims."""

import pytest

from groundlm.cli import parse, presets
from groundlm.models import count_parameters
from groundlm.training.config import TrainConfig

PARAMETERS = {
    "gpn-m-1l-130m": 129_151_902,  # counted in the paper's reference code
    "gpn-m-2l-130m": 132_786_326,
    "gpn-130m": 130_839_584,
    "gpn-m-1l-bias-130m": 129_152_670,
    "transformer-130m": 128_994_048,
    "gated-deltanet-130m": 129_012_088,
    "gated-deltanet-1l-130m": 129_178_654,
    "mamba2-130m": 130_005_728,
    "mamba2-1l-130m": 129_582_611,
    "gpn-m-1l-s": 4_957_448,
    "gpn-m-2l-s": 4_954_472,
    "gpn-s": 4_959_632,
    "gpn-m-1l-xs": 1_266_312,
    "gpn-m-2l-xs": 1_264_806,
    "gpn-xs": 1_263_648,
    "gpn-m-1l-bias-xs": 1_266_440,
    "transformer-xs": 1_267_072,
    "gated-deltanet-xs": 1_267_104,
    "gated-deltanet-1l-xs": 1_266_120,
    "mamba2-xs": 1_267_176,
    "mamba2-1l-xs": 1_264_441,
    "quickstart": 1_528_456,
}


def test_no_preset_is_without_a_count():
    assert set(presets()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_builds_with_its_count(name):
    config = parse(TrainConfig, ["--config", name], "train", uses_presets=True)
    config.check()
    assert count_parameters(config.model)["total"] == PARAMETERS[name]
    text = presets()[name].read_text()
    assert f"{PARAMETERS[name]:,} parameters" in " ".join(text.split())
    assert config.training.out == f"runs/{name}"


def test_headline_memory_has_the_papers_cells():
    from groundlm.models import build_config

    sizes = parse(TrainConfig, ["--config", "gpn-m-1l-130m"], "train", uses_presets=True).model
    assert build_config(sizes).memory_cells == 491_520
