"""Tokenizers: loading, training on a corpus, and a fingerprint that ties token files to them."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from groundlm.errors import UserError

# Tried in this order when a tokenizer names no end-of-sequence token itself.
KNOWN_EOS_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
TRAINED_EOS_TOKEN = "<|endoftext|>"
BYTE_ALPHABET_SIZE = 256
# The trainer's time grows with the square of a word's length: a 5 MB line without a space would
# take hours. Cut here, such a run still counts; encoding has no such limit.
LONG_RUN = re.compile(r"\S{1000}|\s{1000}")


def load_tokenizer(source: str, eos_token: str | None = None) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer and settle its end-of-sequence (EOS) token.

    `source` is a folder (a transformers tokenizer, or only a `tokenizer.json`), a `tokenizer.json`
    file, or a name on the hub. The EOS token is `eos_token` if given (it must be in the
    vocabulary), else the tokenizer's own, else the first of `KNOWN_EOS_TOKENS` it knows.

    Raises UserError when the source cannot be loaded, has no fast (`tokenizers`) form, or has no
    EOS token.
    """
    tokenizer = _read(source)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(f"tokenizer '{source}' has no tokenizer.json (fast) form")
    vocabulary = tokenizer.get_vocab()
    if eos_token is not None:
        if eos_token not in vocabulary:
            raise UserError(
                f"--eos-token '{eos_token}' is not among the {len(vocabulary):,} entries of "
                f"tokenizer '{source}'"
            )
        chosen = eos_token
    elif tokenizer.eos_token is not None:
        chosen = tokenizer.eos_token
    else:
        known = [token for token in KNOWN_EOS_TOKENS if token in vocabulary]
        if not known:
            raise UserError(
                f"tokenizer '{source}' names no end-of-sequence token and has none of "
                f"{', '.join(KNOWN_EOS_TOKENS)}: name one with --eos-token"
            )
        chosen = known[0]
    if tokenizer.eos_token != chosen:
        tokenizer.eos_token = chosen
    return tokenizer


def _read(source: str) -> PreTrainedTokenizerFast:
    path = Path(source)
    try:
        if path.is_dir():
            if (path / "tokenizer_config.json").is_file():
                return AutoTokenizer.from_pretrained(str(path))
            if not (path / "tokenizer.json").is_file():
                raise UserError(f"tokenizer folder '{source}' holds no tokenizer.json")
            return _from_file(path / "tokenizer.json")
        if path.is_file():
            return _from_file(path)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.endswith(".json"):
            raise UserError(f"tokenizer '{source}' is no such file or folder")
        return AutoTokenizer.from_pretrained(source)
    except UserError:
        raise
    # The hub client, transformers and the Rust parser raise a dozen types between them, the last
    # a bare Exception; whatever they say, the user's mistake is the same.
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"tokenizer '{source}' cannot be loaded: {reason}") from error


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` entries, the same every time.

    `<|endoftext|>` (id 0) is EOS and BOS; the 256 bytes follow, so every text can be encoded and
    decodes to itself. No space is added before the text. A small corpus may give fewer entries.

    Raises UserError if `vocab_size` does not hold the bytes and the special token.
    """
    smallest = BYTE_ALPHABET_SIZE + 1
    if vocab_size < smallest:
        raise UserError(
            f"a byte-level tokenizer needs at least {smallest} entries (256 bytes and "
            f"{TRAINED_EOS_TOKEN}), not {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TRAINED_EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in cut_runs(text)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TRAINED_EOS_TOKEN,
        bos_token=TRAINED_EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def cut_runs(text: str) -> Iterator[str]:
    """The text in pieces such that no run of non-spaces or spaces is longer than LONG_RUN's."""
    start = 0
    for run in LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


def canonical_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """The backend as sorted JSON without truncation and padding, which belong to a call."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["truncation"] = backend["padding"] = None
    return json.dumps(backend, sort_keys=True, ensure_ascii=True)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Hex SHA-256 of the canonical backend JSON: equal in memory and after save and load."""
    return hashlib.sha256(canonical_json(tokenizer).encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Number of ids a model needs: the largest id plus one, holes in the vocabulary included."""
    return max(tokenizer.get_vocab().values()) + 1
