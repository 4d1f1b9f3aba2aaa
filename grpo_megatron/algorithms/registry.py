"""Named choices: each axis of an objective is a registry of small pure functions."""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.errors import ConfigError


class Registry:
    """Functions of one axis by name."""

    def __init__(self, axis: str):
        self.axis = axis
        self.functions: dict[str, Callable] = {}

    def register(self, name: str) -> Callable[[Callable], Callable]:
        def add(function: Callable) -> Callable:
            assert name not in self.functions, f"{self.axis} {name!r} is registered twice"
            self.functions[name] = function
            return function
        return add

    def __getitem__(self, name: str) -> Callable:
        if name not in self.functions:
            raise ConfigError(f"unknown {self.axis} {name!r}; known: {sorted(self.functions)}",
                              where=f"objective.{self.axis}")
        return self.functions[name]
