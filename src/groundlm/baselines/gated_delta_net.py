"""Gated DeltaNet as a language model: transformers' Qwen3-Next layers, none of which attends.

The forward pass is that of transformers' classes, whose tensors have the same names here. Two
things are added: initial values of the decay that suit training from nothing, and states that are
carried although no layer counts tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3NextModel,
    Qwen3NextPreTrainedModel,
)
from transformers import initialization as init
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from groundlm.errors import UserError

LINEAR = "linear_attention"
SLOWEST_DT, FASTEST_DT = 1e-3, 1e-1


@strict
class GatedDeltaNetConfig(Qwen3NextConfig):
    """Sizes under the names of Qwen3-Next; those of attention and of experts mean nothing here.

    The defaults are the paper's: 10 layers, 768 wide, 6 heads of 128 x 256. Raises `UserError` for
    layers of another kind.
    """

    model_type = "gated_delta_net"

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 1408
    num_hidden_layers: int = 10
    linear_num_key_heads: int = 6
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 256
    num_experts: int = 0
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = [LINEAR] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        if set(self.layer_types) != {LINEAR} or len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"model.layer_types is {self.layer_types}: all {self.num_hidden_layers} layers of "
                f"a gated_delta_net are {LINEAR}"
            )
        if self.num_experts:
            raise UserError(f"model.num_experts is {self.num_experts}: a gated_delta_net has none")

    @property
    def memory_cells(self) -> int:
        """Numbers held by the memories of all layers for one sequence."""
        heads = self.linear_num_value_heads
        cells = heads * self.linear_key_head_dim * self.linear_value_head_dim
        return self.num_hidden_layers * cells


class GatedDeltaNetStart(Qwen3NextPreTrainedModel):
    """Initial values: transformers' own, but for `dt_bias`.

    Gated DeltaNet and Mamba-2 were published with softplus(dt_bias) log-uniform in [0.001, 0.1], so
    that heads forget over few to many tokens (as a GPN's do, too). transformers starts it at 1,
    which with A uniform up to 16 forgets everything in each token.
    """

    config_class = GatedDeltaNetConfig
    config: GatedDeltaNetConfig

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Qwen3NextGatedDeltaNet):
            bounds = math.log(SLOWEST_DT), math.log(FASTEST_DT)
            dt = torch.empty_like(module.dt_bias).uniform_(*bounds).exp_()
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))


class GatedDeltaNetModel(GatedDeltaNetStart, Qwen3NextModel):
    """The stack of layers: last hidden state [B, T, hidden_size] and the cache."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Qwen3NextModel`; `position_ids` is accepted and, without attention, of no effect.

        Given positions and masks, the stack asks no layer for the tokens it has seen, which is
        known to attention layers only. `attention_mask` [B, T] is 0 at padding, on the left.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        mask_BT = create_recurrent_attention_mask(self.config, inputs_embeds, attention_mask)
        return super().forward(
            attention_mask={"full_attention": None, LINEAR: mask_BT},
            position_ids=torch.zeros(1, inputs_embeds.shape[1], device=inputs_embeds.device).long(),
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class GatedDeltaNetForCausalLM(GatedDeltaNetStart, Qwen3NextForCausalLM):
    """The stack with its head."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        Qwen3NextPreTrainedModel.__init__(self, config)
        self.model = GatedDeltaNetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()


AutoConfig.register("gated_delta_net", GatedDeltaNetConfig)
AutoModel.register(GatedDeltaNetConfig, GatedDeltaNetModel)
AutoModelForCausalLM.register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM)
