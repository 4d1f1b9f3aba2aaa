"""Which file, line or flag set each value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_megatron.config.keys import KeyPath, is_array_of_tables


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value: `Origin("recipe", "recipes/demo/gspo-moe-cpu.toml:12")`."""

    kind: Literal["default", "preset", "model", "recipe", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"flag {self.where}" if self.kind == "flag" else self.where or self.kind


DEFAULT = Origin("default")


@dataclass
class Layers:
    """A tree of settings merged from layers, lowest first, and the origin of every node."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def merge(self, values: Mapping[str, Any], origin_of: Callable[[KeyPath], Origin],
              tree: dict[str, Any] | None = None, prefix: KeyPath = ()) -> None:
        """Put a layer on top: tables merge, everything else (also lists) replaces."""
        tree = self.tree if tree is None else tree
        for key, value in values.items():
            path = (*prefix, key)
            if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
                self.origins[path] = origin_of(path)
                self.merge(value, origin_of, tree[key], path)
            else:
                tree[key] = self.place(path, value, origin_of)

    def place(self, path: KeyPath, value: Any, origin_of: Callable[[KeyPath], Origin]) -> Any:
        """Record the origins of `value`, forget those of what it replaces, return a copy."""
        for old in [known for known in self.origins if known[:len(path)] == path]:
            del self.origins[old]
        return self._record(path, value, origin_of)

    def _record(self, path: KeyPath, value: Any, origin_of: Callable) -> Any:
        self.origins[path] = origin_of(path)
        if isinstance(value, Mapping):
            return {key: self._record((*path, key), item, origin_of)
                    for key, item in value.items()}
        if is_array_of_tables(value):
            return [self._record((*path, index), item, origin_of)
                    for index, item in enumerate(value)]
        return list(value) if isinstance(value, list | tuple) else value

    def origin(self, path: KeyPath) -> Origin:
        """Origin of the node, else of the nearest node above it, else the default."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return DEFAULT
