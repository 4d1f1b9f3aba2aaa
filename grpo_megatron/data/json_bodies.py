"""Bodies of requests: JSON as clients of any language write it."""

import json
import math
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
    except msgspec.DecodeError:
        if not any(half in body for half in _HALF):
            raise
    text = body.decode()
    try:
        value = json.loads(text, parse_constant=no_constant, parse_float=_finite)
    except ValueError as error:  # with integers of more digits than Python reads
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
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


def no_constant(constant: str) -> None:
    """Refuse what Python reads beside JSON (`parse_constant` of json.loads). Raises ValueError."""
    raise ValueError(f"{constant} is no number")


def _finite(number: str) -> float:
    """Refuse what Python reads as infinite: no JSON could be written of it."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number[:20]} is out of range")
    return value
