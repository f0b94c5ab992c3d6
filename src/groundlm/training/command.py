"""`groundlm train`: what the command prints and the code it ends with."""

from __future__ import annotations

from groundlm.training.config import TrainConfig
from groundlm.training.distributed import is_writer
from groundlm.training.loop import run_train

__all__ = ["TrainConfig", "train_command"]


def train_command(config: TrainConfig) -> int:
    """Train and say where the result lies; 0, or 128 + signal when a signal stopped the run."""
    figures = run_train(config)
    if is_writer():
        print(f"step {figures['step']}, {figures['tokens']:,} tokens: {figures['checkpoint']}")
        if figures["skipped_steps"]:
            print(f"{figures['skipped_steps']} steps skipped: loss or gradient not finite")
        if figures.get("heldout_step") == figures["step"] and (
            figures["heldout_nats_per_token"] is not None
        ):
            nats = figures["heldout_nats_per_token"]
            print(f"held-out {nats:.4f} nats per token; score all of it with")
            print(f"  groundlm eval --model {figures['checkpoint']} --data {config.data.path}")
        if figures["interrupted_by"]:
            print("stopped by a signal; the same command continues the run")
    return 128 + figures["interrupted_by"] if figures["interrupted_by"] else 0
