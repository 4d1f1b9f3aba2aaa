"""A tokenizer of one token a character, and prompts, answers and scored groups in it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt
from tests.controller.scored_groups import group


def characters() -> SimpleNamespace:
    """A tokenizer of one token a character, without `@`."""

    def encode(text, *, where=None):
        if "@" in text:
            raise DataError("no token for '@'", where=where)
        return [ord(character) for character in text]

    return SimpleNamespace(
        encode=encode,
        refuse_unwritable=encode,
        encode_batch=lambda texts, where=None: [encode(text) for text in texts],
        decode=lambda ids: "".join(map(chr, ids)),
        chat_template=None,
    )


def asked(question: str, name: str = "new") -> Prompt:
    return Prompt(name, "d", question, tuple(map(ord, question)), "", {}, question)


def answered(question, texts, right, *, name=None, truncated=()):
    """A scored group whose answers are `texts`, one token a character."""
    scored = group(right, name=name or question, lengths=list(map(len, texts)), truncated=truncated)
    completions = []
    for completion, text in zip(scored.group.completions, texts, strict=True):
        ids = np.array([ord(character) for character in text], np.int32)
        completions.append(replace(completion, token_ids=ids, text=text))
    prompt = asked(question, name or question)
    return replace(
        scored, group=replace(scored.group, prompt=prompt, completions=tuple(completions))
    )


def text_of(prompt: Prompt) -> str:
    return "".join(map(chr, prompt.token_ids))
