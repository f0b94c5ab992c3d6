"""transformers' `generate` for a model whose context is a state instead of a cache of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from groundlm.errors import UserError
from groundlm.model import boundaries
from groundlm.model.state import GPNState
from groundlm.model.text_hash import prefix_hashes


class GPNGenerationMixin(GenerationMixin):
    """What differs from transformers' `generate`: what a state has read need not be read again."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        state: GPNState | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' `generate`, starting from a state if one is given.

        Args:
            inputs: prompt ids [B, T] (also as `input_ids`), or `inputs_embeds`.
            generation_config: as in transformers.
            state: go on from this state; the prompt is what comes after it, possibly nothing
                ([B, 0], or none at all). A state of one row serves all B prompts.
            args, kwargs: as in transformers. A state given as `cache` or `past_key_values` stands
                for the beginning of `inputs`, as after `generate(...,
                return_dict_in_generate=True)`: the sequences are read on from where it is. They may
                be left out as far as it has read if `attention_mask` still covers them. `resets`,
                `cu_seqlens` and `attention_mask` concern the prompt; after a prompt of several
                documents go on with `state=` and the new tokens.

        Raises:
            UserError: assisted decoding, which would have to rewind; the state of another model, or
                of other rows; `inputs` that do not begin with what a `cache` has read; a state
                together with `use_cache=False`.
        """
        others = [kwargs.pop(name, None) for name in ("cache", "past_key_values", "cache_params")]
        start = same_state(state, *others)
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        given = kwargs.get("inputs_embeds") if ids is None else ids
        if given is not None:
            _boundaries_as_resets(kwargs, *given.shape[:2])
        if start is None:
            return super().generate(ids, generation_config, *args, **kwargs)
        if given is None:
            given = torch.empty(start.batch_size, 0, dtype=torch.int64)
        if start.batch_size == 1:
            start = start.repeat(len(given))
        elif start.batch_size != len(given):
            raise UserError(f"the state has {start.batch_size} rows, the input has {len(given)}")
        mask = kwargs.get("attention_mask")
        read = 0
        if state is None and ids is None:
            _refuse_ambiguous(start, given.shape[1])
        elif state is None:
            pad = self._pad_token(kwargs, generation_config)
            read = _columns_read(start, given, mask, pad)
        if mask is not None and mask.shape[1] > given.shape[1]:
            kwargs["attention_mask"] = mask[:, mask.shape[1] - given.shape[1] :]
        if given.shape[1] == 0:  # of several empty prompts transformers takes embeddings alone
            weight = self.get_input_embeddings().weight
            ids, kwargs["inputs_embeds"] = None, weight.new_empty(len(given), 0, weight.shape[1])
        # From here on positions are columns of `inputs`: that is what generate slices by.
        kwargs["cache"] = replace(
            start,
            positions_seen=torch.full_like(start.tokens_seen, read),
            hash_before_B=start.hash_before_B if read else start.text_hash_B,
        )
        return super().generate(ids, generation_config, *args, **kwargs)

    def _pad_token(
        self, kwargs: dict[str, Any], generation_config: GenerationConfig | None
    ) -> int | None:
        """The id that `generate` fills up with, by transformers' order of precedence."""
        configs = [c for c in (generation_config, self.generation_config) if c is not None]
        for name in ("pad_token_id", "eos_token_id"):
            for value in [kwargs.get(name), *(getattr(c, name) for c in configs)]:
                if value is not None:
                    return int(torch.as_tensor(value).reshape(-1)[0])
        return None

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: GPNState | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        resets: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; document boundaries concern the prompt, not what follows it."""
        if resets is not None and (is_first_iteration or cache is None):
            columns = input_ids.shape[1]
            if is_first_iteration and inputs_embeds is not None:
                columns = inputs_embeds.shape[1]
            first = 0 if cache is None else cache.get_seq_length()
            last = first + (next_sequence_length or columns)
            kwargs["resets"] = F.pad(resets, (0, last - resets.shape[1]))[:, first:]
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        cache = model_kwargs.get("cache")
        if cache is not None and not model_kwargs.get("use_cache", True):
            raise UserError("use_cache=False cannot go on from a state: leave one of them out")
        if cache is None and generation_config.prefill_chunk_size is not None:
            model_kwargs["cache"] = self.model.zero_state(len(input_ids))
        embedded = model_kwargs.get("inputs_embeds")
        prompt = input_ids if embedded is None else embedded
        if cache is not None and prompt.shape[1] == cache.get_seq_length():
            # The state is the prediction already.
            return ModelOutput(logits=self.next_logits(cache).unsqueeze(1), cache=cache)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: Any, mode_kwargs: Any
    ) -> None:
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise UserError(
                "assisted decoding has to take drafted tokens back, and a GPN state cannot be "
                "rewound: generate without assistant_model and prompt_lookup_num_tokens"
            )
        if generation_config.output_attentions:
            raise UserError("output_attentions: a GPN has no attentions to return")
        super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        if expand_size > 1 and model_kwargs.get("cache") is not None:
            model_kwargs["cache"] = model_kwargs["cache"].repeat(expand_size)
        return super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the first call makes its own start state; there is no per-layer cache."""
        return False

    def _reorder_cache(self, cache: GPNState, beam_idx: Tensor) -> GPNState:
        """The rows that beam search goes on with (`rows` would wait for an accelerator)."""
        return cache.map(lambda t: t.index_select(0, beam_idx.to(t.device)))


def same_state(*given: GPNState | None) -> GPNState | None:
    """The one state among its several names."""
    states = [s for s in given if s is not None]
    if any(s is not states[0] for s in states):
        raise UserError("state, cache and past_key_values name one thing: give one of them")
    if states and not isinstance(states[0], GPNState):
        raise UserError(f"the cache is a {type(states[0]).__name__}, a GPN goes on from a GPNState")
    return states[0] if states else None


def _columns_read(state: GPNState, ids_BT: Tensor, mask: Tensor | None, pad: int | None) -> int:
    """How many of the first columns of the ids the state has read; 0 if they are said to be new."""
    if mask is not None and mask.shape[1] > ids_BT.shape[1]:
        return 0  # a mask longer than the ids says that they are what comes next
    if ids_BT.shape[1] == 0 or not bool(state.tokens_seen.any()):
        return 0
    if state.text_hash_B is None:
        raise UserError(
            "this cache does not say what it has read: give it as state= and only the new tokens"
        )
    counted = [torch.ones_like(ids_BT, dtype=torch.bool) if mask is None else mask.bool()]
    if pad is not None:
        counted.append(ids_BT != pad)
    # Rows that ended early went on with pads, and these were read.
    counted += [real_BT.long().cumsum(1) > 0 for real_BT in counted]
    # The columns may be all that the state has read, or what it has read since the last `generate`.
    wanted_B = state.text_hash_B.to(ids_BT.device)
    zero_B = torch.zeros_like(wanted_B)
    before = [zero_B if state.hash_before_B is None else state.hash_before_B.to(zero_B), zero_B]
    matches = [
        prefix_hashes(hash_B, ids_BT.long() + 1, real_BT) == wanted_B[:, None]
        for real_BT in counted
        for hash_B in before
    ]
    columns = torch.stack(matches).any(0).all(0).nonzero()
    if not len(columns):
        raise UserError(
            "the input does not begin with what this cache has read: give it as state= and only "
            "the new tokens"
        )
    return int(columns[-1])


def _boundaries_as_resets(kwargs: dict[str, Any], batch: int, time: int) -> None:
    """Bring the document boundaries of a prompt into the one form that its steps can drop."""
    forms = [kwargs.pop(name, None) for name in ("resets", "position_ids", "cu_seqlens")]
    resets, real = boundaries.document_starts(batch, time, *forms)
    if resets is not None:
        kwargs["resets"] = resets
    if real is not None:
        mask = kwargs.get("attention_mask")
        kwargs["attention_mask"] = real.long() if mask is None else real.long() * mask


def _refuse_ambiguous(state: GPNState, columns: int) -> None:
    """Embeddings cannot show whether the state has read their beginning."""
    if 0 < state.get_seq_length() < columns:
        raise UserError(
            f"{columns} columns of inputs_embeds and a cache that has read "
            f"{state.get_seq_length()}: give the cache as state= and only what comes after it"
        )
