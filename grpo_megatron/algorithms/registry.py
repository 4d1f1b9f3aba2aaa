"""Named choices: each axis of an objective is a registry of small pure functions."""

from collections.abc import Callable

from grpo_megatron.errors import ConfigError


class Registry:
    """Functions of one axis by name, with what they need beyond rewards and lengths."""

    def __init__(self, axis: str):
        self.axis = axis
        self.functions: dict[str, Callable] = {}
        self.needs: dict[str, frozenset[str]] = {}

    def register(self, name: str, needs: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
        """Args: needs: columns of `SampleBatch.tokens` that the function reads."""
        def add(function: Callable) -> Callable:
            assert name not in self.functions, f"{self.axis} {name!r} is registered twice"
            self.functions[name], self.needs[name] = function, frozenset(needs)
            return function
        return add

    def __getitem__(self, name: str) -> Callable:
        if name not in self.functions:
            raise ConfigError(f"unknown {self.axis} {name!r}; known: {sorted(self.functions)}",
                              where=f"objective.{self.axis}")
        return self.functions[name]
