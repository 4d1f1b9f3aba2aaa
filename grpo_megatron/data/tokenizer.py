"""Text to token ids and back, from a Hugging Face checkpoint directory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from grpo_megatron.errors import DataError, raised_as


class TextTokenizer:
    """Never adds special tokens and never maps text to an unknown token. `stop_token_ids` are all
    that end a completion: those of generation_config.json, of config.json, of the tokenizer."""

    def __init__(
        self,
        backend: Tokenizer,
        eos_token_id: int,
        stop_token_ids: Sequence[int],
        unk_token_id: int | None,
    ):
        self._backend = backend
        self._unk_token_id = unk_token_id
        self.eos_token_id = eos_token_id
        self.stop_token_ids = tuple(sorted({eos_token_id, *stop_token_ids}))

    def encode(self, text: str, *, where: str | None = None) -> list[int]:
        """Token ids of `text`; DataError where there is no token for a character of it."""
        return self.encode_batch([text], where=where)[0]

    def encode_batch(self, texts: Sequence[str], *, where: str | None = None) -> list[list[int]]:
        try:
            batch = [
                encoding.ids
                for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)
            ]
            bad = next(
                (text for text, ids in zip(texts, batch, strict=True) if self._unk_token_id in ids),
                None,
            )
        except Exception:  # the library raises plain Exception
            bad = next((text for text in texts if any(map(self._lacks, text))), texts[0])
        if bad is not None:
            lacking = ", ".join(map(repr, sorted(filter(self._lacks, set(bad))))) or "a character"
            shown = bad if len(bad) <= 120 else f"{bad[:117]}..."
            raise DataError(
                f"the tokenizer has no token for {lacking} in the text {shown!r}",
                where=where,
                remedy="change the text, or the tokenizer's alphabet",
            )
        return batch

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are skipped, the rest is decoded as it is."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def _lacks(self, char: str) -> bool:
        try:
            ids = self._backend.encode(char, add_special_tokens=False).ids
        except Exception:  # the library raises plain Exception
            return True
        if not ids:
            return not char.isspace()  # many tokenizers drop white space between words
        return self._unk_token_id in ids


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a checkpoint directory; DataError where it is unreadable or has no end."""
    backend = _backend(path)
    settings, generation, config = (
        _read_json(path / f"{name}.json")
        for name in ("tokenizer_config", "generation_config", "config")
    )

    def token_id(kind: str) -> int | None:
        token = settings.get(kind)
        text = token.get("content") if isinstance(token, dict) else token
        return backend.token_to_id(text) if text else None

    found = [
        source.get("eos_token_id") for source in (generation, config.get("text_config") or config)
    ]
    stop_ids = [
        i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None
    ]
    eos = token_id("eos_token")
    if eos is None and not stop_ids:
        raise DataError(
            "no end token in tokenizer_config, generation_config or config.json",
            where=str(path),
            remedy="add eos_token_id to generation_config.json",
        )
    return TextTokenizer(
        backend, stop_ids[0] if eos is None else eos, stop_ids, token_id("unk_token")
    )


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
            backend = Tokenizer.from_file(str(file))
        else:  # older checkpoints: transformers builds the fast tokenizer, where it has one
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(path, local_files_only=True).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    with raised_as(DataError, "not JSON", ValueError, where=file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
