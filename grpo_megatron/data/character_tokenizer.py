"""One token per character: the tokenizer of the tiny models, in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict
from grpo_megatron.errors import DataError

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|endoftext|>"
PAD_TOKEN_ID, EOS_TOKEN_ID = 0, 1

# Contents one after the other: a text model without roles has no tokens to mark turns with.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class CharacterTokenizerConfig(Strict):
    """`[tokenizer]` of a model preset."""

    kind: Literal["characters"]
    """One token per character."""
    alphabet: str = Field(min_length=1)
    """Every character that a prompt or an answer may hold, once each."""
    pad_to_multiple: int = Field(32, ge=1)
    """The vocabulary is filled up to a multiple of this."""


def character_vocabulary(config: CharacterTokenizerConfig) -> dict[str, int]:
    """Token -> id: padding, end of text, the alphabet, then visible fillers.

    Fillers are ordinary tokens rather than missing rows: an untrained policy samples them, and
    they must show in the decoded text instead of vanishing from a wrong answer.

    Raises:
        DataError: A character occurs twice in the alphabet.
    """
    repeated = sorted({c for c in config.alphabet if config.alphabet.count(c) > 1})
    if repeated:
        raise DataError(f"the alphabet holds {repeated[0]!r} more than once",
                        where="[tokenizer] alphabet", remedy="remove the repetition")
    tokens = [PAD_TOKEN, EOS_TOKEN, *config.alphabet]
    num_fillers = -len(tokens) % config.pad_to_multiple
    tokens += [f"<|unused_{index}|>" for index in range(num_fillers)]
    return {token: index for index, token in enumerate(tokens)}


def write_character_tokenizer(directory: Path, config: CharacterTokenizerConfig) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the vocabulary's size."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = character_vocabulary(config)
    # No unknown token: the library then raises on a character outside of the alphabet.
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD_TOKEN, special=True, normalized=False),
                                  AddedToken(EOS_TOKEN, special=True, normalized=False)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN, "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return len(vocabulary)
