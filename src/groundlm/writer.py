"""A model with its tokenizer, ready to write: prompts in, continued texts and states out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import BaseStreamer

from groundlm.data.tokenizer import load_tokenizer, vocabulary_size
from groundlm.errors import UserError
from groundlm.model.loading import load_model
from groundlm.model.modeling import GPNForCausalLM
from groundlm.model.state import GPNState
from groundlm.models import resolve_device

LEAST_TEMPERATURE = 1e-6
"""Below it the most likely token is taken: float32 could tell no other, and might overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the fields mean what they mean in `GenerateConfig`."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """The same for transformers' `generate`, whose own defaults (top_k 50) stay out."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        if self.temperature < LEAST_TEMPERATURE or self.top_p == 0 or self.top_k == 1:
            return chosen | {"do_sample": False}
        return chosen | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True)
class Text:
    """One continued prompt."""

    prompt: str
    new_text: str
    new_tokens: int
    """Tokens written, the end-of-sequence token included if it ended the text."""
    state: GPNState | None
    """The state after the last token written (one row), if it was asked for."""


class Writer:
    """Continues texts with one model."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sampling: Sampling
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling

    @classmethod
    def load(
        cls, folder: str, sampling: Sampling, dtype: str, device: str, scan: str = "auto"
    ) -> Writer:
        """The model and the tokenizer of a folder; raises `UserError` as their loaders do."""
        model = load_model(folder, dtype, resolve_device(device))
        model.generation_config = GenerationConfig()  # `sampling` alone decides, not the folder
        if isinstance(model, GPNForCausalLM):
            model.scan_backend = scan
        return cls(model, load_tokenizer(folder), sampling)

    @property
    def gpn(self) -> GPNForCausalLM:
        """The model as a GPN; call `require_state` first."""
        return cast(GPNForCausalLM, self.model)

    def require_state(self) -> None:
        """Raise `UserError` if the model keeps no state that could be handed over."""
        if not isinstance(self.model, GPNForCausalLM):
            kind = self.model.config.model_type
            raise UserError(f"states and the interactive mode need a gpn, this model is a {kind}")

    def unused_ids(self) -> list[int]:
        """Rows of the embedding that stand for no token (a padded vocabulary): never written."""
        size = self.model.get_input_embeddings().weight.shape[0]
        return list(range(vocabulary_size(self.tokenizer), size))

    def load_state(self, path: str | Path) -> GPNState:
        """A state of this model from a file, on the model's device."""
        return GPNState.load(path, self.gpn, self.model.device)

    def save_state(self, state: GPNState | None, path: str | Path) -> None:
        """Write a state of this model."""
        if state is not None:
            state.save(path, model=self.gpn)

    def encode(self, text: str, goes_on: bool = False) -> list[int]:
        """Token ids; a text that goes on from a state gets no special token of its own.

        Without a state, an empty text is the BOS token or else the EOS token. Raises `UserError`
        for an id that the model does not know.
        """
        check_unicode(text)
        ids = self.tokenizer(text, add_special_tokens=not goes_on)["input_ids"]
        if not ids and not goes_on:
            bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
            ids = [eos if bos is None else bos]
        size = self.model.get_input_embeddings().weight.shape[0]
        if ids and max(ids) >= size:
            raise UserError(
                f"the tokenizer gives id {max(ids)}, the model's vocabulary has {size}: they do "
                "not belong together"
            )
        return ids

    def continue_text(
        self,
        prompt: str,
        state: GPNState | None = None,
        stream: TextIO | None = None,
        keep_state: bool = False,
    ) -> Text:
        """One prompt, its continuation written to `stream` while it grows."""
        return self._continue([prompt], state, stream, keep_state)[0]

    def continue_batch(
        self, prompts: list[str], state: GPNState | None = None, keep_state: bool = False
    ) -> list[Text]:
        """Several prompts at once; a state has one row for all of them or one for each."""
        return self._continue(prompts, state, None, keep_state)

    @torch.inference_mode()
    def _continue(
        self,
        prompts: list[str],
        state: GPNState | None,
        stream: TextIO | None,
        keep_state: bool,
    ) -> list[Text]:
        ids = [self.encode(prompt, goes_on=state is not None) for prompt in prompts]
        ids_BT, mask_BT = self._left_padded(ids)
        streamer = None if stream is None else Streamer(self.tokenizer, ids[0], stream)
        written_BT, reached = self._generate(ids_BT, mask_BT, state, streamer)
        new_BT = written_BT[:, ids_BT.shape[1] :]
        ended_BT = (new_BT == self.tokenizer.eos_token_id).long()
        real_BT = ended_BT.cumsum(1) - ended_BT == 0  # up to and with the first EOS
        states = None
        if keep_state:
            whole_BT = torch.cat([mask_BT.bool(), real_BT], 1)
            states = self._states_after(written_BT, whole_BT, state, reached)
        counts = real_BT.sum(1).tolist()
        return [
            Text(
                prompt,
                decode_after(self.tokenizer, ids[i], new_BT[i, : counts[i]].tolist()),
                counts[i],
                None if states is None else states.rows(i),
            )
            for i, prompt in enumerate(prompts)
        ]

    def _generate(
        self, ids_BT: Tensor, mask_BT: Tensor, state: GPNState | None, streamer: Streamer | None
    ) -> tuple[Tensor, GPNState | None]:
        """Prompts with what was written, and the state before the last token of a GPN."""
        if self.sampling.max_new_tokens == 0:
            return ids_BT, None
        out = self.model.generate(
            ids_BT,
            attention_mask=mask_BT,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.eos_token_id,
            suppress_tokens=self.unused_ids() or None,
            streamer=streamer,
            return_dict_in_generate=True,
            **({} if state is None else {"state": state}),
            **self.sampling.arguments(),
        )
        return out.sequences, out.cache if isinstance(out.cache, GPNState) else None

    def _states_after(
        self, ids_BT: Tensor, real_BT: Tensor, start: GPNState | None, reached: GPNState | None
    ) -> GPNState | None:
        """The state after the real tokens of each row; `reached` lacks the last column.

        It went on past the end of texts that ended before others: these alone are read again.
        """
        if reached is None:  # nothing was written
            return self._state_after(ids_BT, real_BT, start)
        states = self._state_after(ids_BT[:, -1:], real_BT[:, -1:], reached)
        early = (~real_BT[:, -1]).nonzero().squeeze(1)
        if states is None or not len(early):
            return states
        if start is not None and start.batch_size > 1:
            start = start.rows(early)
        again = self._state_after(ids_BT[early], real_BT[early], start)
        assert again is not None
        places = torch.arange(len(ids_BT), device=early.device)
        places[early] = len(ids_BT) + torch.arange(len(early), device=early.device)
        return GPNState.concatenate([states, again]).rows(places)

    def _state_after(
        self, ids_BT: Tensor, real_BT: Tensor, start: GPNState | None
    ) -> GPNState | None:
        """The state after the real tokens among `ids_BT`, read on top of `start`."""
        if ids_BT.shape[1] == 0:
            return start
        out = self.gpn.model(
            ids_BT, attention_mask=real_BT, state=start, use_cache=True, return_dict=True
        )
        return out.cache

    def _left_padded(self, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T], int64, short rows filled up in front."""
        width = max(map(len, ids))
        fill = self.tokenizer.eos_token_id
        rows = [[fill] * (width - len(row)) + row for row in ids]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
        device = self.model.device
        shape = (len(ids), width)
        return (
            torch.tensor(rows, dtype=torch.int64, device=device).reshape(shape),
            torch.tensor(mask, dtype=torch.int64, device=device).reshape(shape),
        )


def check_unicode(prompt: str, where: str = "the prompt") -> None:
    """Raise `UserError` for a prompt that no tokenizer can take (half of a surrogate pair)."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is no valid Unicode at character {error.start}") from None


def decode_after(tokenizer: PreTrainedTokenizerFast, context: list[int], ids: list[int]) -> str:
    """The text that `ids` add after `context`, spaces between the two included."""
    tail = context[-CONTEXT_TOKENS:]
    before = tokenizer.decode(tail, **PLAIN)
    return tokenizer.decode(tail + ids, **PLAIN)[len(before) :]


PLAIN = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}

CONTEXT_TOKENS = 8
"""Tokens decoded again with each new one, so that spaces and split characters come out right."""


class Streamer(BaseStreamer):
    """Prints tokens as they are written; a character split over tokens waits for its end."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, context: list[int], stream: TextIO
    ) -> None:
        self.tokenizer = tokenizer
        self.shown = context[-CONTEXT_TOKENS:]
        self.waiting: list[int] = []
        self.stream = stream
        self.prompt_is_next = True

    def put(self, value: Tensor) -> None:
        """Called with the prompt first, then with each new token."""
        if self.prompt_is_next:
            self.prompt_is_next = False
            return
        self.waiting += value.flatten().tolist()
        text = decode_after(self.tokenizer, self.shown, self.waiting)
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def end(self) -> None:
        """Print what is left, even half a character."""
        if self.waiting:
            self._print(decode_after(self.tokenizer, self.shown, self.waiting))

    def _print(self, text: str) -> None:
        self.shown = (self.shown + self.waiting)[-CONTEXT_TOKENS:]
        self.waiting = []
        self.stream.write(text)
        self.stream.flush()
