"""`key=value` overrides: dotted keys, TOML values, bare words as text, `null` to unset."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath, dotted, split_key
from grpo_megatron.config.problems import Problem
from grpo_megatron.config.provenance import Layers, Origin


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed `key=value`; parts of `keys` that index a list are still text."""

    text: str
    keys: tuple[str, ...]
    raw: str

    @property
    def origin(self) -> Origin:
        return Origin("flag", self.text)


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Split each `key=value`; what cannot be split becomes a problem."""
    parsed, problems = [], []
    for text in texts:
        key, equals, raw = text.partition("=")
        try:
            keys = split_key(key) if equals else ()
        except ValueError:
            keys = ()
        if keys:
            parsed.append(Override(text, keys, raw))
        else:
            problems.append(Problem(
                key or text, "is not a key=value override", where=f"flag {text}",
                remedy="write a dotted key and a TOML value, for example trainer.num_ranks=4"))
    return parsed, problems


def apply_override(layers: Layers, override: Override) -> Problem | None:
    """Set one override in the tree; returns what kept it from being set."""
    node: Any = layers.tree
    path: KeyPath = ()
    for depth, key in enumerate(override.keys):
        if isinstance(node, dict):
            path = (*path, key)
        elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
            path = (*path, int(key))
        else:
            return _misplaced(layers, override, path, node)
        if depth == len(override.keys) - 1:
            break
        node = _descend(layers, node, path, override)
    try:
        value = _value_of(override.raw, path)
    except ValueError as error:
        return Problem(dotted(path), f"is not valid TOML: {error}", f"flag {override.text}",
                       value=override.raw, meaning=schema.meaning_of(path),
                       remedy="quote text, and mind the shell's own quotes: 'key=[\"a\", \"b\"]'")
    node[path[-1]] = layers.place(path, value, lambda _: override.origin)
    return None


def _descend(layers: Layers, node: Any, path: KeyPath, override: Override) -> Any:
    """The child at `path[-1]`; missing tables are made, missing lists count as empty."""
    key = path[-1]
    if isinstance(node, dict) and node.get(key) is None:
        if schema.is_list(path):
            return []
        node[key] = {}
        layers.origins[path] = override.origin
    return node[key]


def _misplaced(layers: Layers, override: Override, path: KeyPath, node: Any) -> Problem:
    """The override points into a value that has no such place."""
    name, where = dotted(path), f"flag {override.text}"
    if isinstance(node, list):
        rest = override.keys[len(path) + 1:]
        valid = tuple(dotted((*path, index, *rest)) for index in range(min(len(node), 4)))
        count = f"{name} has {len(node)} element(s), counted from 0"
        return Problem(".".join(override.keys), count, where, nearest=valid,
                       remedy=f"use an index that exists, or set the whole list: {name}=[…]")
    return Problem(".".join(override.keys), f"{name} is a single value, not a table", where,
                   value=override.raw, nearest=(name,), remedy=f"set {name} itself",
                   related=(f"{name} was set at {layers.origin(path)}",))


def _value_of(raw: str, path: KeyPath) -> Any:
    """TOML value of `raw`, or `raw` as text; `null` is None.

    Raises:
        ValueError: It starts like a list or a table, but is none.
    """
    text = raw.strip()
    if text == "null":
        return None
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if text[:1] in ("[", "{") and not schema.takes_text(path):
            raise ValueError(str(error)) from None
        return raw
    value = document["value"]
    is_number_for_text = schema.takes_text(path) and not isinstance(value, str)
    return raw if len(document) > 1 or is_number_for_text else value
