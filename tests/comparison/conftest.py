"""A comparison of two tiny models that takes seconds."""

from dataclasses import replace

import pytest

from groundlm.comparison.config import CompareConfig, ModelConfig
from groundlm.training.config import DataConfig, OptimizerConfig, TrainingConfig
from helpers import GPN, LLAMA


@pytest.fixture
def compare_config(token_data, tmp_path):
    def build(**values):
        config = CompareConfig(
            models=[ModelConfig("grounded", model=GPN), ModelConfig("deep", model=LLAMA)],
            reference="deep",
            out=str(tmp_path / "table"),
            seeds=[1, 2],
            target_parameters=8000,
            data=DataConfig(str(token_data), 16),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
            training=TrainingConfig(steps=4, batch_size=4, log_every=1, eval_every=2,
                                    eval_windows=4, save_every=2, keep_checkpoints=1),
        )  # fmt: skip
        return replace(config, **values)

    return build
