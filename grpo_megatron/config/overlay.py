"""Settings merged from layers, who set each value (file, line or flag), and the topmost layer:
`key=value` overrides with dotted keys, TOML values, bare words as text, `null` to unset."""

import contextlib
import copy
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_origin

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath, dotted, nearest_above, nodes, split_key
from grpo_megatron.config.problems import ConfigProblem


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value: `Origin("recipe", "recipes/demo/gspo-moe-cpu.toml:12")`."""

    kind: Literal["default", "preset", "model", "recipe", "flag"]
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "flag":
            return f"flag {self.where}"
        return self.where or self.kind


DEFAULT = Origin("default")


@dataclass
class ConfigOverlay:
    """A tree of settings merged from layers, lowest first, and the origin of every node."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def merge(
        self,
        values: Mapping[str, Any],
        origin_of: Callable[[KeyPath], Origin],
        tree: dict[str, Any] | None = None,
        prefix: KeyPath = (),
    ) -> None:
        """Put a layer on top: tables merge, everything else (also lists) replaces."""
        if tree is None:
            tree = self.tree
        for key, value in values.items():
            path = (*prefix, key)
            if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
                self.origins[path] = origin_of(path)
                self.merge(value, origin_of, tree[key], path)
            else:
                tree[key] = self.place(path, value, origin_of)

    def place(self, path: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> Any:
        """Record the origins of `value`, forget those of what it replaces, return a copy."""
        if path in self.origins:  # where a node has none, nothing below it has
            self._forget(path)
        for node, _ in nodes(value, path):
            self.origins[node] = origin_of(node)
        return copy.deepcopy(value)

    def _forget(self, path: KeyPath) -> None:
        for known in list(self.origins):
            if known[: len(path)] == path:
                del self.origins[known]

    def origin(self, path: KeyPath) -> Origin:
        """Return who set the value at `path`, or the nearest table around it."""
        return nearest_above(path, self.origins) or DEFAULT


def apply_overrides(overlay: ConfigOverlay, texts: Sequence[str]) -> list[ConfigProblem]:
    """Set each `key=value` in the tree, in order; what cannot be set becomes a problem."""
    problems = []
    for text in texts:
        problem = _apply(overlay, text)
        if problem is not None:
            problems.append(problem)
    return problems


def _apply(overlay: ConfigOverlay, text: str) -> ConfigProblem | None:
    key, equals, raw = text.partition("=")
    origin = Origin("flag", text)
    keys: tuple[str, ...] = ()
    with contextlib.suppress(ValueError):
        if equals:
            keys = split_key(key)
    if not keys:
        return ConfigProblem(
            key or text,
            "is not a key=value override",
            str(origin),
            remedy="write a dotted key and a TOML value, like trainer.num_ranks=4",
        )
    node: Any = overlay.tree
    path: KeyPath = ()
    for part in keys:
        if path:
            node = _child(overlay, node, path, origin)
        if isinstance(node, dict):
            path = (*path, part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            path = (*path, int(part))
        else:
            return _misplaced(overlay, keys, path, node, raw, origin)
    try:
        value = _value_of(raw, path)
    except ValueError as error:
        return ConfigProblem(
            dotted(path),
            f"is not valid TOML: {error}",
            str(origin),
            value=raw,
            meaning=schema.meaning_of(path),
            remedy='quote text, and mind the shell\'s own quotes: \'key=["a", "b"]\'',
        )
    node[path[-1]] = overlay.place(path, value, lambda _: origin)
    return None


def _child(overlay: ConfigOverlay, node: Any, path: KeyPath, origin: Origin) -> Any:
    """Return the child at `path[-1]`; missing tables are made, missing lists count as empty."""
    key = path[-1]
    if isinstance(node, dict) and node.get(key) is None:
        if get_origin(schema.type_of(path)) is tuple:
            return []
        node[key] = {}
        overlay.origins[path] = origin
    return node[key]


def _misplaced(
    overlay: ConfigOverlay, keys: Sequence[str], path: KeyPath, node: Any, raw: str, origin: Origin
) -> ConfigProblem:
    name = dotted(path)
    key = ".".join(keys)
    if isinstance(node, list):
        rest = keys[len(path) + 1 :]
        valid = tuple(dotted((*path, index, *rest)) for index in range(min(len(node), 4)))
        message = f"{name} has {len(node)} element(s), counted from 0"
        remedy = f"use an index that exists, or set the whole list: {name}=[…]"
        if not node:
            message = f"{name} has no elements"
            remedy = f"set the whole list before: {name}=[…]"
        return ConfigProblem(key, message, str(origin), nearest=valid, remedy=remedy)
    return ConfigProblem(
        key,
        f"{name} is a single value, not a table",
        str(origin),
        value=raw,
        nearest=(name,),
        remedy=f"set {name} itself",
        related=(f"{name} was set at {overlay.origin(path)}",),
    )


def _value_of(raw: str, path: KeyPath) -> Any:
    """TOML value of `raw`, or `raw` as text; ValueError for what only starts like list or table."""
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
    has_further_lines = len(document) > 1
    if has_further_lines or is_number_for_text:
        return raw
    return value
