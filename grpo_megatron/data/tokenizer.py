"""Text to token ids and back, from a Hugging Face checkpoint directory."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from grpo_megatron.data.chat_template import ChatTemplate, read_chat_template
from grpo_megatron.errors import DataError, raised_as


class TextTokenizer:
    """Never adds special tokens, never maps text to an unknown token, nor to one that the model
    does not have. `stop_token_ids` are all that end a completion: those of generation_config.json,
    of config.json, of the tokenizer. `chat_template`: the tokenizer's own, if it has one.
    `model_tokens`: the model's vocab_size; a tokenizer may have added tokens beyond it, as long as
    no text has them."""

    def __init__(
        self,
        backend: Tokenizer,
        eos_token_id: int,
        stop_token_ids: Sequence[int],
        unk_token_id: int | None,
        chat_template: ChatTemplate | None = None,
        model_tokens: int | None = None,
    ):
        self.chat_template = chat_template
        self._model_tokens = sys.maxsize
        if model_tokens is not None:
            self._model_tokens = model_tokens
        self._backend = backend
        self._unk_token_id = unk_token_id
        self._lacks_character: dict[str, bool] = {}
        self._writable: set[str] = set()
        """Characters that were tried, and have a token."""
        self.eos_token_id = eos_token_id
        self.stop_token_ids = tuple(sorted({eos_token_id, *stop_token_ids}))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers with the same tokens, rules and special tokens."""
        return _fingerprint(self._backend)

    def encode(self, text: str, *, where: str | None = None) -> list[int]:
        """Return token ids of `text`. Raises DataError where there is no token for a character of
        it."""
        return self.encode_batch([text], where=where)[0]

    def encode_batch(self, texts: Sequence[str], *, where: str | None = None) -> list[list[int]]:
        """Return token ids of each of `texts`; DataError as of `encode`."""
        return [encoding.ids for encoding in self._encodings(texts, where)]

    def refuse_unwritable(self, text: str, *, where: str | None = None) -> None:
        """Raise DataError as `encode` does. No token is made of a text whose characters all have
        one, which is faster: each character is tried once."""
        unknown = set(text) - self._writable
        # what is beyond the model is known only of a whole text's tokens
        if self._exceeds_model or any(map(self._lacks_remembered, unknown)):
            self.encode(text, where=where)
        else:
            self._writable |= unknown

    def encode_with_places(
        self, texts: Sequence[str], *, where: str | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return, for each text, its token ids and the character at which each token begins. Raises
        DataError as `encode` does."""
        found = []
        for encoding in self._encodings(texts, where):
            found.append((encoding.ids, [start for start, _ in encoding.offsets]))
        return found

    def _encodings(self, texts: Sequence[str], where: str | None) -> list[Encoding]:
        try:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        except Exception:  # the library raises plain Exception
            lacking = [text for text in texts if self._lacking_characters(text)]
            raise self._refusal([*lacking, *texts][0], where) from None
        for text, encoding in zip(texts, encodings, strict=True):
            if self._lacks_some(text, encoding):
                raise self._refusal(text, where)
            if self._exceeds_model:
                self._require_ids_of_model(encoding.ids, where)
        return list(encodings)

    @cached_property
    def _exceeds_model(self) -> bool:
        """Whether a token has an id that the model does not have."""
        return max(self._backend.get_vocab().values(), default=0) >= self._model_tokens

    def _require_ids_of_model(self, ids: Sequence[int], where: str | None) -> None:
        largest = max(ids, default=0)
        if largest >= self._model_tokens:
            raise _beyond_model(self.token_text(largest), largest, self._model_tokens, where)

    def _lacks_some(self, text: str, encoding: Encoding) -> bool:
        """Whether the unknown token stands for something else than its own text."""
        if self._unk_token_id is None or self._unk_token_id not in encoding.ids:
            return False
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id == self._unk_token_id and text[start:end].strip() != self._unk_text:
                return True
        return False

    @cached_property
    def _unk_text(self) -> str:
        """What stands for the unknown token where a text has it; empty where there is none."""
        if self._unk_token_id is None:
            return ""
        return self._backend.id_to_token(self._unk_token_id) or ""

    def _refusal(self, text: str, where: str | None) -> DataError:
        unmarked = text
        if self._unk_text:
            unmarked = text.replace(self._unk_text, " ")
        characters = ", ".join(map(repr, self._lacking_characters(unmarked)))
        shown = text
        if len(text) > 120:
            shown = f"{text[:117]}..."
        return DataError(
            f"the tokenizer has no token for {characters or 'a character'} in the text {shown!r}",
            where=where,
            remedy="change the text, or the tokenizer's alphabet",
        )

    def writable(self, text: str) -> str:
        """Return the text with "?" for every character that the tokenizer has no token for; without
        these characters where it has none for "?" either."""
        replacement = "?"
        if self._lacks_remembered(replacement):
            replacement = ""
        table = {}
        for character in set(text):
            if self._lacks_remembered(character):
                table[ord(character)] = replacement
        if not table:
            return text
        return text.translate(table)

    def _lacks_remembered(self, character: str) -> bool:
        if character not in self._lacks_character:
            self._lacks_character[character] = self._lacks(character)
        return self._lacks_character[character]

    def _lacking_characters(self, text: str) -> list[str]:
        return sorted(character for character in set(text) if self._lacks(character))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens are skipped, the rest is decoded as it
        is."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def end_of_turn(self, text: str) -> tuple[int, ...]:
        """Return the ids that end an answer, of what a chat template writes behind it: up to the
        first token that ends a completion, else the first special token; `eos_token_id` where it
        writes neither."""
        ids = self.encode(text)
        for ends in (self.stop_token_ids, self.special_token_ids):
            for place, token in enumerate(ids):
                if token in ends:
                    return tuple(ids[: place + 1])
        return (self.eos_token_id,)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, as the tokenizer marks them."""
        added = self.added_tokens
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Tokens that are found in a text before it is cut into any others, by id."""
        added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        return added

    def decode_exactly(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens too; what is no UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it, special ones too."""
        return self._backend.id_to_token(token_id) or f"<{token_id}>"

    def _lacks(self, char: str) -> bool:
        try:
            ids = self._backend.encode(char, add_special_tokens=False).ids
        except Exception:  # the library raises plain Exception
            return True
        if not ids:
            return not char.isspace()  # many tokenizers drop white space between words
        return self._unk_token_id in ids


def load_tokenizer(path: Path) -> TextTokenizer:
    """Return the tokenizer of a checkpoint directory. Raises DataError where it is unreadable or
    has no end."""
    backend = _backend(path)
    settings = _read_json(path / "tokenizer_config.json")
    generation = _read_json(path / "generation_config.json")
    config = _read_json(path / "config.json")
    text_config = config.get("text_config") or config
    stop_ids = [*_end_ids(generation), *_end_ids(text_config)]
    eos = _special_id(backend, settings, "eos_token")
    if eos is None:
        if not stop_ids:
            raise DataError(
                "no end token in tokenizer_config, generation_config or config.json",
                where=str(path),
                remedy="add eos_token_id to generation_config.json",
            )
        eos = stop_ids[0]
    model_tokens = text_config.get("vocab_size")
    if model_tokens is not None and eos >= model_tokens:
        raise _beyond_model(backend.id_to_token(eos), eos, model_tokens, str(path))
    return TextTokenizer(
        backend,
        eos,
        stop_ids,
        _special_id(backend, settings, "unk_token"),
        read_chat_template(path),
        model_tokens,
    )


def _beyond_model(
    token: str | None, token_id: int, model_tokens: int, where: str | None
) -> DataError:
    return DataError(
        f"the tokenizer has the id {token_id} for {token!r}, and the model has {model_tokens} "
        "tokens (vocab_size in its config.json)",
        where=where,
        remedy="use the tokenizer that belongs to the model, or a model whose embeddings were "
        "resized for it",
    )


def token_with_another_id(path: Path, ours: Path) -> tuple[str, int, int] | None:
    """Return the first token that the tokenizer.json in the checkpoint directory `path` knows by
    another id than that in `ours`, with both ids; None where there is none, or a directory has no
    such file. One of them may lack tokens, and reserved ones, which no text has, may differ.

    Raises DataError where one is unreadable."""
    if not all((directory / "tokenizer.json").is_file() for directory in (path, ours)):
        return None
    theirs = _backend(path).get_vocab()
    vocabulary = _backend(ours).get_vocab()
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        our_id = vocabulary[token]
        their_id = theirs.get(token, our_id)
        if their_id != our_id and "reserved" not in token:
            return token, their_id, our_id
    return None


def _fingerprint(backend: Tokenizer) -> str:
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _special_id(backend: Tokenizer, settings: Mapping[str, Any], kind: str) -> int | None:
    """Return the id of `eos_token` or `unk_token`; tokenizer_config.json has its text, or
    fields."""
    text = settings.get(kind)
    if isinstance(text, dict):
        text = text.get("content")
    if not text:
        return None
    return backend.token_to_id(text)


def _end_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the ids of `eos_token_id`, which is one id, several or none."""
    found = settings.get("eos_token_id")
    if found is None:
        return []
    if isinstance(found, list):
        return found
    return [found]


def _backend(path: Path) -> Tokenizer:
    if not path.is_dir():
        raise DataError("no such checkpoint directory", where=str(path))
    file = path / "tokenizer.json"
    with raised_as(
        DataError,
        "unreadable tokenizer",
        where=file,
        remedy="copy tokenizer.json from the original checkpoint",
    ):
        if file.is_file():
            backend: Tokenizer = Tokenizer.from_file(str(file))
        else:  # older checkpoints: transformers builds the fast tokenizer, where it has one
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(path, local_files_only=True).backend_tokenizer
    if not set(backend.get_vocab().values()) - set(backend.get_added_tokens_decoder()):
        # of a directory without files transformers makes one that has special tokens only
        raise DataError(
            "the model's directory has no tokenizer",
            where=str(file),
            remedy="copy tokenizer.json and tokenizer_config.json from the original checkpoint",
        )
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with raised_as(DataError, "not JSON", ValueError, where=file):
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings
