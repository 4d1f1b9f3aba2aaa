"""Functions under the names that a recipe calls them by."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(dict[str, Function]):
    """The choices of one axis of `[objective]`: function by registered name, in order.

    The name is what a recipe says (`clip = "none"`); the function is free to have a longer one."""

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorate the function of the choice `name`.

        Raises ValueError when the name is taken."""

        def add(function: Function) -> Function:
            if name in self:
                raise ValueError(f"{name} is registered twice")
            self[name] = function
            return function

        return add
