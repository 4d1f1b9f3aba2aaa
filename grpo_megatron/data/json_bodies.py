"""Bodies of requests: JSON as clients of any language write it."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_HALF = (b"\\ud", b"\\uD")
"""How half of a character begins, which JSON can write and no text has."""


def read_json(body: bytes) -> Any:
    """Return the value of a body. Halves of characters in its texts become U+FFFD: a client that
    cuts a text within a character writes them, and JSON allows it. Raises msgspec.DecodeError where
    the body is no JSON, UnicodeError where it is no UTF-8, RecursionError where it is nested too
    deeply."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        refusal = error
    if not any(half in body for half in _HALF):
        raise refusal
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant)
    except json.JSONDecodeError:
        raise refusal from None
    return well_formed(value)


def well_formed(value: Any) -> Any:
    """Return a value of JSON with U+FFFD for halves of characters, which no tokenizer takes."""
    if isinstance(value, str):
        return well_formed_text(value)
    if isinstance(value, Mapping):
        return {well_formed_text(name): well_formed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    return value


def well_formed_text(text: str) -> str:
    """Return the text with U+FFFD for halves of characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_constant(constant: str) -> None:
    """Refuse what Python reads beside JSON."""
    raise json.JSONDecodeError(f"{constant} is no number", constant, 0)
