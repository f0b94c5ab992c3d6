"""Twenty made-up LAMBADA-like passages."""

import json
from pathlib import Path

import torch

from groundlm.evaluation.lambada import split_last_word
from groundlm.evaluation.text import TextEncoder

PASSAGES = [
    "the state reads a token and writes the memory",
    "it writes it back again and again and then it reads the state",
    "ground the token predict the next and decode the vector",
    "one vector holds all of it said the memory to the vector",
    "the memory",
    "again",
    "of tokens and of states the last is the first",
    "a token is a token is a token",
    "decode it again she said and it was decoded",
    "what the state forgets the memory keeps",
    "two  spaces stand before the  end",
    "a passage with a space behind its last word ",
    'quotes "stand" here and there said \'nobody',
    "the word is naïveté",
    "an emoji may be the last word 🙂",
    "日本 is a vector and so is 日本",
    "line\nbreaks may stand inside\n\nand the word comes after one",
    "numbers like 12 and 345 come last 6789",
    "long words come last too, for instance incomprehensibilities",
    "the state of the state is the state of the memory of the state",
]


def write_passages(path: Path, passages: list[str] = PASSAGES) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages), "utf-8")
    return path


def answered_right(model, tokenizer) -> list[str]:
    """Passages whose last word begins as the model would say; some of them end there."""
    encoder, found = TextEncoder(tokenizer), []
    for text in PASSAGES:
        context = split_last_word(text)[0].rstrip()
        ids, _ = encoder.encode_pair(context, " x")
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        word = tokenizer.decode([best])
        for target in (word, f"{word}xq"):
            right = encoder.encode_pair(context, target)[1][:1] == [best]
            if right and word.startswith(" ") and len(target.split()) == 1:
                found.append(context + target)
    assert found
    return found
