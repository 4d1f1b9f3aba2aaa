"""Dotted keys: `domains.0.weight` is the path `("domains", 0, "weight")`."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

KeyPath = tuple[str | int, ...]
_T = TypeVar("_T")

_BARE = re.compile(r"[A-Za-z0-9_*-]+")


def dotted(path: KeyPath) -> str:
    """`("domains", 0, "weight")` -> `domains.0.weight`; parts with odd characters are quoted."""
    parts = []
    for part in path:
        if _BARE.fullmatch(str(part)):
            parts.append(str(part))
        else:
            parts.append(f'"{part}"')
    return ".".join(parts)


def split_key(text: str) -> tuple[str, ...]:
    """`domains.0."odd key"` -> `("domains", "0", "odd key")`; ValueError for what is no key."""
    parts: list[str] = []
    node: Any = tomllib.loads(f"{text} = 0")
    while isinstance(node, dict):
        [(part, node)] = node.items()
        parts.append(part)
    return tuple(parts)


def nodes(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield a value and everything below it, in order, with paths."""
    yield path, value
    for key, item in _children(value):
        yield from nodes(item, (*path, key))


def leaves(value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield everything that is set as one value, with its path."""
    for path, node in nodes(value):
        if not _children(node):
            yield path, node


def _children(value: Any) -> Collection[tuple[str | int, Any]]:
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return list(enumerate(value))  # of tables; other lists count as one value
    if isinstance(value, Mapping):
        return value.items()
    return ()


def nearest_above(path: KeyPath, known: Mapping[KeyPath, _T]) -> _T | None:
    """Return what is known of `path` itself, else of the nearest table around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in known:
            return known[path[:length]]
    return None


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key in a configuration; `None` where a table on the way is
    absent."""
    node: Any = config
    for part in key.split("."):
        if isinstance(node, tuple):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.get(part)
        else:
            node = getattr(node, part, None)
    return node
