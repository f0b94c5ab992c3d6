"""The GPN as transformers classes: parameters, initial values, loss, generation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput, can_return_tuple

from groundlm.errors import UserError
from groundlm.model import cell
from groundlm.model.config import GPNConfig
from groundlm.model.state import GPNState
from groundlm.ops import grounded_scan, linear_cross_entropy, resolve_backend
from groundlm.ops.linear_cross_entropy import IGNORE_INDEX, shift_targets


class NormWeight(nn.Module):
    """The weight of an RMS norm; `cell.rms_norm` applies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Matrix(nn.Linear):
    """A linear map that knows how it starts: `lecun`, `normal` (initializer_range) or `zeros`."""

    def __init__(self, fan_in: int, fan_out: int, bias: bool = False, start: str = "lecun") -> None:
        super().__init__(fan_in, fan_out, bias=bias)
        self.start = start


class Ground(nn.Module):
    """Token side and gate of the grounding step."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.token_norm = NormWeight(c.embedding_size)
        self.token_proj = Matrix(c.embedding_size, c.state_size)
        self.gate_norm = NormWeight(c.state_size)
        self.gate = Matrix(c.state_size, c.state_size, bias=True, start="zeros")

    def params(self) -> cell.GroundParams:
        return cell.GroundParams(self.gate_norm.weight, self.gate.weight, self.gate.bias)


class Memory(nn.Module):
    """The write side of the shared memory."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.write_norm = NormWeight(c.state_size)
        self.key = Matrix(c.state_size, c.num_heads * c.head_k_dim, bias=True)
        self.value = Matrix(c.state_size, c.num_heads * c.head_v_dim)
        self.beta = Matrix(c.state_size, c.num_heads)
        self.decay = Matrix(c.state_size, c.num_heads)
        self.A_log = nn.Parameter(torch.empty(c.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(c.num_heads))

    def params(self) -> cell.MemoryParams:
        return cell.MemoryParams(
            self.write_norm.weight,
            self.key.weight,
            self.key.bias,
            self.value.weight,
            self.beta.weight,
            self.decay.weight,
            self.A_log,
            self.dt_bias,
        )


class Read(nn.Module):
    """One layer's query of the memory and the way back to the state."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.query = Matrix(c.state_size, c.num_heads * c.head_k_dim, bias=True)
        self.gate = Matrix(c.state_size, c.num_heads * c.head_v_dim)
        self.out_norm = NormWeight(c.num_heads * c.head_v_dim)
        self.out = Matrix(c.num_heads * c.head_v_dim, c.state_size, start="normal")

    def params(self) -> cell.ReadParams:
        return cell.ReadParams(
            self.norm.weight,
            self.query.weight,
            self.query.bias,
            self.gate.weight,
            self.out_norm.weight,
            self.out.weight,
        )


class FFN(nn.Module):
    """SwiGLU; `up` holds the swish half above the linear half."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.up = Matrix(c.state_size, 2 * c.ffn_size)
        self.down = Matrix(c.ffn_size, c.state_size, start="zeros")


class Predict(nn.Module):
    """One predict layer."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.ffn = FFN(c)
        self.gate_norm = NormWeight(c.state_size)
        self.gate = Matrix(c.state_size, c.state_size, bias=True, start="zeros")
        self.read = Read(c) if c.num_heads else None

    def params(self) -> cell.PredictParams:
        return cell.PredictParams(
            self.ffn.norm.weight,
            self.ffn.up.weight,
            self.ffn.down.weight,
            self.gate_norm.weight,
            self.gate.weight,
            self.gate.bias,
            None if self.read is None else self.read.params(),
        )


class Decode(nn.Module):
    """From the predicted state to the embedding space; the embedding itself is shared."""

    def __init__(self, c: GPNConfig) -> None:
        super().__init__()
        self.norm = NormWeight(c.state_size)
        self.proj = Matrix(c.state_size, c.embedding_size)
        self.bias = nn.Parameter(torch.zeros(c.embedding_size)) if c.decoder_bias else None


@dataclass
class GPNModelOutput(ModelOutput):
    """Predicted states [B, T, D] and the state after the last token."""

    last_hidden_state: Tensor | None = None
    cache: GPNState | None = None

    @property
    def state(self) -> GPNState | None:
        """The state after the last token; `cache` and `past_key_values` are the same object."""
        return self.cache

    past_key_values = state


@dataclass
class GPNCausalLMOutput(ModelOutput):
    """Loss in nats per scored token, logits [B, T, W], and the state after the last token."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: GPNState | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def state(self) -> GPNState | None:
        """The state after the last token; `cache` and `past_key_values` are the same object."""
        return self.cache

    past_key_values = state


class GPNPreTrainedModel(PreTrainedModel):
    """Initial values and what transformers needs to know of both model classes."""

    config_class = GPNConfig
    config: GPNConfig
    base_model_prefix = "model"
    _is_stateful = True
    _no_split_modules = ["Predict"]  # noqa: RUF012
    # Norms, biases and the decay stay float32 in a bf16 model: they take part in float32 sums.
    _keep_in_fp32_modules_strict = ["norm", "bias", "A_log"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Every tensor's start, as in the paper's reference code; the gates start at 0.5."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, NormWeight):
            init.ones_(module.weight)
        elif isinstance(module, Matrix):
            if module.start == "zeros":
                init.zeros_(module.weight)
            elif module.start == "normal":
                init.normal_(module.weight, std=self.config.initializer_range)
            else:
                _lecun_normal_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, Memory):
            rate = torch.empty_like(module.A_log).uniform_(0, 16).clamp_min_(1e-6)
            init.copy_(module.A_log, rate.log())
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
            dt.clamp_min_(1e-4)
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))
        elif isinstance(module, Decode) and module.bias is not None:
            init.zeros_(module.bias)


def _lecun_normal_(weight: Tensor) -> None:
    """Normal of variance 1/fan_in, cut at two standard deviations of the uncut normal."""
    uncut_std = 0.8796256610342398  # standard deviation of a unit normal cut at +-2
    std = 1 / math.sqrt(weight.shape[1]) / uncut_std
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class GPNModel(GPNPreTrainedModel):
    """The recurrence over token ids: predicted states and the final state."""

    def __init__(self, config: GPNConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.ground = Ground(config)
        self.memory = Memory(config) if config.num_heads else None
        self.predict = nn.ModuleList(Predict(config) for _ in range(config.num_layers))
        self.decode = Decode(config)
        self.scan_backend = "auto"
        self.post_init()

    @property
    def scan_backend(self) -> str:
        """The backend that walks the recurrence; assign `auto` or a name of `ops.BACKENDS`."""
        return self._scan_backend

    @scan_backend.setter
    def scan_backend(self, name: str) -> None:
        self._scan_backend = resolve_backend(name)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def cell_params(self) -> cell.CellParams:
        """The parameters of the recurrence, as the scan takes them."""
        return cell.CellParams(
            self.ground.params(),
            None if self.memory is None else self.memory.params(),
            tuple(layer.params() for layer in self.predict),
            self.config.norm_eps,
        )

    def zero_state(self, batch_size: int) -> GPNState:
        """The start state for `batch_size` sequences, on the model's device."""
        c, weight = self.config, self.embedding.weight
        shape = (c.num_heads, c.head_k_dim, c.head_v_dim) if c.num_heads else None
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return GPNState.zeros(batch_size, c.state_size, shape, weight.device, dtype)

    def decoder_hidden(self, predicted: Tensor) -> Tensor:
        """States [..., D] -> vectors [..., E] that are compared with every embedding."""
        d = self.decode
        return cell.decoder_hidden(
            predicted, d.norm.weight, d.proj.weight, d.bias, self.config.norm_eps
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: GPNState | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        resets: Tensor | None = None,
        state: GPNState | None = None,
        past_key_values: GPNState | None = None,
        **kwargs: Any,
    ) -> GPNModelOutput:
        """Read T tokens on top of a state.

        Args:
            input_ids: int64 [B, T]; or give `inputs_embeds`, embeddings [B, T, E].
            attention_mask: [B, T] or longer (its last T columns count); 0 leaves the state alone.
            cache: the state to go on from; `state` and `past_key_values` are other names for it.
            use_cache: return the final state (default: the configuration's).
            resets: bool [B, T]; True starts afresh before that token (document boundary).

        Raises:
            UserError: no or two inputs, ids outside the vocabulary, shapes that do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            self._check_ids(input_ids)
            inputs_embeds = self.embedding(input_ids)
        batch, time = inputs_embeds.shape[:2]
        start = _same_state(cache, state, past_key_values) or self.zero_state(batch)
        g = self.ground
        token_BTD = cell.token_contribution(
            inputs_embeds, g.token_norm.weight, g.token_proj.weight, self.config.norm_eps
        )
        predicted_BTD, final = grounded_scan(
            token_BTD,
            self.cell_params(),
            start,
            resets_BT=resets,
            mask_BT=_window_mask(attention_mask, time),
            backend=self.scan_backend,
        )
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return GPNModelOutput(predicted_BTD, final if use_cache else None)

    def _check_ids(self, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise UserError(
                f"input_ids has shape {tuple(input_ids.shape)}, expected [batch, time >= 1]"
            )
        # On an accelerator the look-up itself reports bad ids; asking here would stall it.
        if input_ids.device.type == "cpu" and input_ids.numel():
            low, high = (int(x) for x in torch.aminmax(input_ids))
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise UserError(
                    f"token id {bad} is outside the vocabulary of {self.config.vocab_size}"
                )


def _same_state(*given: GPNState | None) -> GPNState | None:
    """The one state among its three names."""
    states = [s for s in given if s is not None]
    if any(s is not states[0] for s in states):
        raise UserError("state, cache and past_key_values name one thing: give one of them")
    return states[0] if states else None


def _window_mask(attention_mask: Tensor | None, time: int) -> Tensor | None:
    """Bool [B, T] of the tokens that count, or None when all do."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < time:
        raise UserError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected [batch, {time}]"
        )
    mask_BT = attention_mask[:, -time:].bool()
    return None if bool(mask_BT.all()) else mask_BT


class GPNForCausalLM(GPNPreTrainedModel, GenerationMixin):
    """Grounded Prediction Network with its tied decoder, for training and generation."""

    def __init__(self, config: GPNConfig) -> None:
        super().__init__(config)
        self.model = GPNModel(config)
        self.post_init()

    @property
    def scan_backend(self) -> str:
        """The backend that walks the recurrence; assign `auto` or a name of `ops.BACKENDS`."""
        return self.model.scan_backend

    @scan_backend.setter
    def scan_backend(self, name: str) -> None:
        self.model.scan_backend = name

    def get_output_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: GPNState | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> GPNCausalLMOutput:
        """Logits for the token after each of the T tokens read, and the loss if labels are given.

        Args:
            labels: int64 [B, T], aligned with the inputs (the usual shift happens here); -100 is
                not scored.
            shift_labels: instead of `labels`, targets already aligned with the logits.
            num_items_in_batch: divide the summed loss by this number, not by the targets here.
            logits_to_keep: only the last n positions (0: all), or the given positions.
            kwargs: as for `GPNModel.forward`: `resets`, `state`, `past_key_values`.

        Returns:
            The loss (nats per scored token; 0 if nothing is scored), logits, state. In training
            mode with labels the logits are None: the loss is taken over slices of positions, so
            that [B, T, W] never exists.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        predicted_BTD = out.last_hidden_state
        targets_BT = shift_labels if labels is None else shift_targets(labels)
        if targets_BT is not None and targets_BT.shape != predicted_BTD.shape[:2]:
            want = tuple(predicted_BTD.shape[:2])
            raise UserError(f"labels have shape {tuple(targets_BT.shape)}, expected {want}")
        loss = None
        if targets_BT is not None:
            loss = self._loss(predicted_BTD, targets_BT, num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            kept = slice_logits_to_keep(predicted_BTD, logits_to_keep)
            logits = cell.linear(self.model.decoder_hidden(kept), self.model.embedding.weight)
        hidden = (predicted_BTD,) if output_hidden_states else None
        return GPNCausalLMOutput(loss, logits, out.cache, hidden)

    def _loss(
        self, predicted_BTD: Tensor, targets_BT: Tensor, num_items: Tensor | int | None
    ) -> Tensor:
        targets_N = targets_BT.reshape(-1).to(predicted_BTD.device)
        hidden_NE = self.model.decoder_hidden(predicted_BTD).flatten(0, 1)
        total = linear_cross_entropy(hidden_NE, self.model.embedding.weight, targets_N)
        if num_items is None:
            num_items = (targets_N != IGNORE_INDEX).sum().clamp_min(1)
        elif torch.is_tensor(num_items):
            num_items = num_items.to(total.device)
        return total / num_items

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the first call makes its own start state; there is no per-layer cache."""
        return False

    def _reorder_cache(self, cache: GPNState, beam_idx: Tensor) -> GPNState:
        """The rows that beam search goes on with."""
        return cache.rows(beam_idx)


AutoConfig.register("gpn", GPNConfig)
AutoModel.register(GPNConfig, GPNModel)
AutoModelForCausalLM.register(GPNConfig, GPNForCausalLM)
