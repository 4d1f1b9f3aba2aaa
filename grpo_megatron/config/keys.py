"""Dotted keys: `domains.0.weight` is the path `("domains", 0, "weight")`."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_*-]+")


def dotted(path: KeyPath) -> str:
    """`("domains", 0, "weight")` -> `domains.0.weight`; parts with odd characters are quoted."""
    return ".".join(str(part) if _BARE.fullmatch(str(part)) else f'"{part}"' for part in path)


def split_key(text: str) -> tuple[str, ...]:
    """`domains.0."odd key"` -> `("domains", "0", "odd key")`; ValueError for what is no key."""
    parts: list[str] = []
    node: Any = tomllib.loads(f"{text} = 0")
    while isinstance(node, dict):
        [(part, node)] = node.items()
        parts.append(part)
    return tuple(parts)


def is_array_of_tables(value: Any) -> bool:
    """Whether `value` is a list with tables in it; other lists count as one value."""
    return isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value)


def leaves(value: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield `(path, value)` of everything that is set as one value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*prefix, key))
    elif is_array_of_tables(value):
        for index, item in enumerate(value):
            yield from leaves(item, (*prefix, index))
    else:
        yield prefix, value


def value_at(config: Any, key: str) -> Any:
    """Value of a dotted key in a configuration; `None` where a table on the way is absent."""
    node: Any = config
    for part in key.split("."):
        if isinstance(node, tuple):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node
