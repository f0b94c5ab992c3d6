"""The GPN as transformers classes: parameters, initial values, loss, generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput, can_return_tuple

from groundlm.errors import UserError
from groundlm.model import cell
from groundlm.model.alignment import align_weights
from groundlm.model.boundaries import (
    check_positions,
    document_starts,
    refuse_unknown,
    require_whole_numbers,
    window_mask,
)
from groundlm.model.config import GPNConfig
from groundlm.model.generating import GPNGenerationMixin, same_state
from groundlm.model.modules import Decode, Ground, Matrix, Memory, NormWeight, Predict, tensor_of
from groundlm.model.state import GPNState
from groundlm.model.text_hash import extend_hash
from groundlm.ops import grounded_scan, linear_cross_entropy, resolve_backend
from groundlm.ops.linear_cross_entropy import IGNORE_INDEX, shift_targets


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
    supports_gradient_checkpointing = True
    _no_split_modules = ["Predict"]  # noqa: RUF012
    # Norms, biases and the decay stay float32 in a bf16 model: they take part in float32 sums.
    _keep_in_fp32_modules_strict = ["norm", "bias", "A_log"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers', with weights that give the saved model's numbers to the bit."""
        loaded = super().from_pretrained(*args, **kwargs)
        align_weights(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

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
        self.tap: cell.Tap | None = None
        """Is shown every value of every step and may replace it; None: nobody listens."""
        self.gradient_checkpointing = False
        self.norm_eps = config.norm_eps
        self.post_init()
        self._state_sizes = self.zero_state(0).sizes

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
        parts = self._modules
        memory = parts.get("memory")
        return cell.CellParams(
            parts["ground"].params(),
            None if memory is None else memory.params(),
            tuple(layer.params() for layer in parts["predict"]),
            self.norm_eps,
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
        norm, proj = tensor_of(d, "norm"), tensor_of(d, "proj")
        return cell.decoder_hidden(predicted, norm, proj, d._parameters.get("bias"), self.norm_eps)

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
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> GPNModelOutput:
        """Read T tokens on top of a state.

        Args:
            input_ids: int64 [B, T]; or give `inputs_embeds`, embeddings [B, T, E].
            attention_mask: [B, T] or longer (its last T columns count); 0 leaves the state alone.
            cache: the state to go on from, of B rows or of one row that all share; `state` and
                `past_key_values` are other names for it.
            use_cache: return the final state (default: the configuration's).
            resets: bool [B, T]; True starts afresh before that token (document boundary).
            cu_seqlens: int [N + 1], instead of `resets`: the bounds of the documents in one packed
                row. The first document goes on from the state given; tokens past the last bound
                are not read.
            kwargs: `position_ids` [B, T], instead of `resets`: every 0 starts a document. Anything
                else that transformers does not hand to all models is refused.

        Raises:
            UserError: no or two inputs, ids outside the vocabulary, shapes that do not fit, the
                state of another model, an unknown argument.
        """
        position_ids = kwargs.pop("position_ids", None)
        if kwargs:
            refuse_unknown(kwargs, ARGUMENTS, position_ids is not None)
        embedded_BTE = self._embed(input_ids, inputs_embeds)
        batch, time = embedded_BTE.shape[:2]
        resets_BT, real_BT = document_starts(batch, time, resets, position_ids, cu_seqlens)
        mask_BT = window_mask(attention_mask, batch, time)
        if real_BT is not None:
            mask_BT = real_BT if mask_BT is None else mask_BT & real_BT
        if mask_BT is not None and inputs_embeds is not None:
            # Whatever stands there, NaN included, reaches neither the state nor a gradient.
            embedded_BTE = torch.where(mask_BT.unsqueeze(-1), embedded_BTE, 0)
        start = self._start_state(same_state(cache, state, past_key_values), batch)
        g = self.ground
        token_BTD = cell.token_contribution(
            embedded_BTE, tensor_of(g, "token_norm"), tensor_of(g, "token_proj"), self.norm_eps
        )
        predicted_BTD, final = self._scan(token_BTD, start, resets_BT, mask_BT)
        if not (self.config.use_cache if use_cache is None else use_cache):
            return GPNModelOutput(predicted_BTD, None)
        if start.text_hash_B is not None:
            if input_ids is None:  # nothing to hash; a reset still counts
                values_BT = torch.zeros(batch, time, dtype=torch.int64, device=token_BTD.device)
                mask_BT = values_BT.bool()
            else:
                values_BT = input_ids.long() + 1
            text_hash_B = extend_hash(start.text_hash_B, values_BT, mask_BT, resets_BT)
            final = replace(final, text_hash_B=text_hash_B)
        return GPNModelOutput(predicted_BTD, final)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            width = self.embedding.weight.shape[1]
            shape = tuple(inputs_embeds.shape)
            if len(shape) != 3 or shape[2] != width or 0 in shape:
                wanted = f"[batch >= 1, time >= 1, {width}]"
                raise UserError(f"inputs_embeds has shape {shape}, expected {wanted}")
            return inputs_embeds
        assert input_ids is not None
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or 0 in shape:
            raise UserError(f"input_ids has shape {shape}, expected [batch >= 1, time >= 1]")
        require_whole_numbers("input_ids", input_ids)
        try:
            return self.embedding(input_ids)
        except IndexError:
            low, high = (int(x) for x in torch.aminmax(input_ids))
            size = self.embedding.weight.shape[0]
            bad = low if low < 0 else high
            raise UserError(f"token id {bad} is outside the vocabulary of {size}") from None

    def _start_state(self, given: GPNState | None, batch: int) -> GPNState:
        if given is None:
            return self.zero_state(batch)
        if given.sizes != self._state_sizes:
            given.check(self.config)
        if given.batch_size == 1 and batch > 1:
            given = given.repeat(batch)
        elif given.batch_size != batch:
            raise UserError(f"the state has {given.batch_size} rows, the input has {batch}")
        weight = self.embedding.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        have = given.predicted_BD
        if have.dtype != dtype or have.device != weight.device:
            given = given.to(weight.device, dtype)
        return given

    def _scan(
        self, token_BTD: Tensor, start: GPNState, resets_BT: Tensor | None, mask_BT: Tensor | None
    ) -> tuple[Tensor, GPNState]:
        params, time = self.cell_params(), token_BTD.shape[1]
        if time == 1 and resets_BT is None and mask_BT is None and self.tap is None:
            return _single_step(token_BTD, params, start)
        return grounded_scan(
            token_BTD,
            params,
            start,
            resets_BT,
            mask_BT,
            backend=self.scan_backend,
            recompute=self.gradient_checkpointing and torch.is_grad_enabled(),
            tap=self.tap,
        )


ARGUMENTS = (
    "input_ids", "attention_mask", "cache", "state", "past_key_values", "inputs_embeds", "labels",
    "use_cache", "resets", "cu_seqlens", "position_ids", "logits_to_keep", "num_items_in_batch",
    "shift_labels", "output_hidden_states",
)  # fmt: skip


def _single_step(
    token_B1D: Tensor, params: cell.CellParams, start: GPNState
) -> tuple[Tensor, GPNState]:
    """One token for every row, straight through the cell: the step of generation."""
    predicted, grounded, memory = cell.step(
        token_B1D[:, 0], start.predicted_BD, start.grounded_BD, start.memory_BHKV, params
    )
    final = replace(
        start,
        predicted_BD=predicted,
        grounded_BD=grounded,
        memory_BHKV=memory,
        tokens_seen=start.tokens_seen + 1,
        positions_seen=start.positions_seen + 1,
    )
    return predicted.unsqueeze(1), final


class GPNForCausalLM(GPNPreTrainedModel, GPNGenerationMixin):
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

    def set_output_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

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
            shift_labels: targets already aligned with the logits; they overrule `labels`.
            num_items_in_batch: divide the summed loss by this number (at least 1), not by the
                targets here.
            logits_to_keep: only the last n positions (0: all), or the given positions.
            kwargs: as for `GPNModel.forward`: `resets`, `cu_seqlens`, `position_ids`, `state`,
                `past_key_values`.

        Returns:
            The loss (nats per scored token; 0 if nothing is scored), logits, state. In training
            mode with labels the logits are None: the loss is taken over slices of positions, so
            that [B, T, W] never exists.

        Raises:
            UserError: as `GPNModel.forward`; labels outside the vocabulary, positions that are not
                there.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        predicted_BTD = out.last_hidden_state
        targets_BT = shift_labels
        if targets_BT is None and labels is not None:
            targets_BT = shift_targets(labels)
        if targets_BT is not None and targets_BT.shape != predicted_BTD.shape[:2]:
            want = tuple(predicted_BTD.shape[:2])
            raise UserError(f"labels have shape {tuple(targets_BT.shape)}, expected {want}")
        loss = None
        if targets_BT is not None:
            loss = self._loss(predicted_BTD, targets_BT, num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            check_positions(logits_to_keep, predicted_BTD.shape[1])
            kept = slice_logits_to_keep(predicted_BTD, logits_to_keep)
            logits = cell.linear(self.model.decoder_hidden(kept), self.model.embedding.weight)
        hidden = (predicted_BTD,) if output_hidden_states else None
        return GPNCausalLMOutput(loss, logits, out.cache, hidden)

    def next_logits(self, state: GPNState) -> Tensor:
        """Logits [B, W] for the token that comes next, which a state holds without reading more."""
        state.check(self.config)
        hidden_BE = self.model.decoder_hidden(state.predicted_BD)
        return cell.linear(hidden_BE, self.model.embedding.weight)

    def _loss(
        self, predicted_BTD: Tensor, targets_BT: Tensor, num_items: Tensor | int | None
    ) -> Tensor:
        require_whole_numbers("labels", targets_BT)
        targets_N = targets_BT.reshape(-1).to(predicted_BTD.device, torch.int64)
        hidden_NE = self.model.decoder_hidden(predicted_BTD).flatten(0, 1)
        total = linear_cross_entropy(hidden_NE, self.model.embedding.weight, targets_N)
        if num_items is None:
            num_items = (targets_N != IGNORE_INDEX).sum()
        # Where nothing is scored, the sum and its gradients are 0, not 0 / 0.
        return total / torch.as_tensor(num_items, device=total.device).clamp_min(1)


AutoConfig.register("gpn", GPNConfig)
AutoModel.register(GPNConfig, GPNModel)
AutoModelForCausalLM.register(GPNConfig, GPNForCausalLM)
