"""Texts of single tokens, for the report."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from grpo_megatron.data.tokenizer import load_tokenizer

Decode = Callable[[Sequence[int]], str]


def decoder(model: Path) -> Decode:
    """Return how the model's tokenizer decodes; without one there is no text, and the page shows
    ids."""
    if (model / "tokenizer.json").exists():
        return load_tokenizer(model).decode
    return lambda token_ids: ""


def exact_decoder(model: Path) -> Decode:
    """Return what `decoder` does, with markers of turns and other special tokens in the text."""
    if (model / "tokenizer.json").exists():
        return load_tokenizer(model).decode_exactly
    return lambda token_ids: ""


def text_pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds to those before: a character may end in a later
    token."""
    texts = [decode(token_ids[:end]).rstrip("\ufffd") for end in range(len(token_ids) + 1)]
    return [text[len(before) :] for before, text in pairwise(texts)]
