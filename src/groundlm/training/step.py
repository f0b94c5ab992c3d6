"""The gradient of one batch: micro-batches, ranks, truncation, carried states, documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from groundlm.data.windows import StreamWindows, TrainingWindows
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.state import GPNState
from groundlm.training.config import TrainConfig
from groundlm.training.distributed import Ranks


class BatchGradient:
    """Adds the gradient of a step's loss to the parameters.

    The loss of a step is the sum over the targets of all ranks and micro-batches divided by their
    number, so neither grouping changes it. Effects on the gradient, each relative to the plain
    window of independent rows:

    - `truncate_tokens` n: the state runs on, the gradient does not flow back over multiples of n.
    - `carry_state`: the window starts from the state that ended the row's last window, detached.
    - `reset_at_documents`: state and memory are zero before each end-of-document token, so no
      gradient crosses it.
    """

    def __init__(
        self, config: TrainConfig, model: PreTrainedModel, windows: TrainingWindows, ranks: Ranks
    ) -> None:
        self._config, self._windows, self._ranks = config, windows, ranks
        self.device = next(model.parameters()).device
        """Where the model computes."""
        self._model = model
        self._rows = ranks.share(config.training.batch_size)
        self._is_gpn = isinstance(model, GPNForCausalLM)
        self.carried: GPNState | None = None
        """The rows' states after the last step, with `carry_state`."""

    def inputs(self, step: int) -> Tensor:
        """This rank's input ids of a step, int64 [rows, T]."""
        return self._windows.rows(step, self._rows.start, len(self._rows))[0].to(self.device)

    def add(self, step: int) -> float:
        """Back-propagate the step's loss; returns it, in nats per target, the same on all ranks."""
        t = self._config.training
        # Dropout, if a model has any, is a function of these three numbers as the data is.
        torch.manual_seed(hash((t.seed, step, self._ranks.rank)) % 2**63)
        inputs_BT, targets_BT = self._windows.rows(step, self._rows.start, len(self._rows))
        starts = self._start_states(step)
        size = t.micro_batch_size or t.batch_size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        ends = []
        for first in range(0, len(inputs_BT), size):
            rows = slice(first, min(first + size, len(inputs_BT)))
            start = None if starts is None else starts.rows(rows)
            loss, end = self._micro_batch(
                inputs_BT[rows].to(self.device), targets_BT[rows].to(self.device), start
            )
            total += loss
            ends.append(end)
        if t.carry_state:
            self.carried = GPNState.concatenate([e for e in ends if e is not None])
        self._ranks.sum_gradients(list(self._model.parameters()))
        return float(self._ranks.sum(total))

    def _start_states(self, step: int) -> GPNState | None:
        """What the rows go on from; None for the zero state."""
        windows = self._windows
        if not isinstance(windows, StreamWindows) or windows.restarts(step):
            return None
        return self.carried

    def _micro_batch(
        self, inputs_BT: Tensor, targets_BT: Tensor, state: GPNState | None
    ) -> tuple[Tensor, GPNState | None]:
        length = self._config.training.truncate_tokens or inputs_BT.shape[1]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, inputs_BT.shape[1], length):
            part = slice(first, first + length)
            out = self._forward(inputs_BT[:, part], targets_BT[:, part], state)
            out.loss.backward()
            total += out.loss.detach()
            state = None if out.get("cache") is None else out["cache"].detach()
        return total, state

    def _forward(self, inputs_BT: Tensor, targets_BT: Tensor, state: GPNState | None) -> Any:
        t = self._config.training
        options: dict[str, Any] = {"use_cache": bool(t.carry_state or t.truncate_tokens)}
        if state is not None:
            options["state"] = state
        if self._config.data.reset_at_documents:
            options["resets"] = inputs_BT == self._windows.split.eos_token_id
        bf16 = t.precision == "bf16"
        with torch.autocast(inputs_BT.device.type, dtype=torch.bfloat16, enabled=bf16):
            return self._model(
                input_ids=inputs_BT,
                labels=targets_BT,
                shift_labels=targets_BT,
                num_items_in_batch=self._windows.batch_tokens,
                **options,
            )
