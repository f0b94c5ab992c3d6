"""Text to ids as the token files were made: no special token added, none read from the text."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from groundlm.data.steps import prepared_backend
from groundlm.data.tokenizer import canonical_json
from groundlm.errors import UserError


class TextEncoder:
    """Encodes text for a model that `groundlm prepare` and `groundlm train` have made.

    In training every document stands after the end-of-document token of the one before it. So that
    token, once, is what every text here is read after (`prefix_id`), whatever BOS the tokenizer has
    or adds by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int | None = None) -> None:
        """With `vocab_size` (of the model), ids from there up are refused.

        Raises `UserError` for a tokenizer without an end-of-sequence token.
        """
        if tokenizer.eos_token is None:
            raise UserError("the tokenizer has no end-of-sequence token to read a text after")
        self.prefix_token = str(tokenizer.eos_token)
        self.prefix_id = int(tokenizer.eos_token_id)
        self._vocab_size = vocab_size
        self._backend = prepared_backend(canonical_json(tokenizer), self.prefix_token)

    @property
    def policy(self) -> str:
        """The prefix in words for a result."""
        return f"{self.prefix_token} (id {self.prefix_id}), once, before each text"

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone.

        Raises `UserError` for a text that is no valid Unicode, or an id that the model has not.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            raise UserError(f"the text is no valid Unicode at character {at}") from None
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._vocab_size is not None and max(ids, default=0) >= self._vocab_size:
            raise UserError(
                f"the tokenizer gives id {max(ids)}, the model's vocabulary has "
                f"{self._vocab_size}: they do not belong together"
            )
        return ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of the context after the prefix, and of the continuation.

        White space at the end of the context is made the beginning of the continuation, so that the
        context ends where a word ends. The continuation is what the ids of both together have
        beyond those of the context, as in lm-evaluation-harness.
        """
        words = context.rstrip()
        context, continuation = words, context[len(words) :] + continuation
        ids = self.encode(context)
        return [self.prefix_id, *ids], self.encode(context + continuation)[len(ids) :]


def read_text(path: str | Path) -> str:
    """The text of a file, every byte of it; `UserError` if it is missing, empty or not UTF-8."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UserError(f"text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"text {path} is not UTF-8 at byte {error.start:,}") from None
    if not text:
        raise UserError(f"text {path} is empty")
    return text
