"""From an environment's name in a recipe to a checked factory of episodes.

A name is one of `SHIPPED`, one that an installed package registers as an entry point of the group
`grpo_megatron.environments`, or `module:function`."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from grpo_megatron.config.imports import imported
from grpo_megatron.config.secret_values import with_secrets
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.environments.protocol import Environment
from grpo_megatron.errors import EpisodeError, GrpoMegatronError, raised_as

GROUP = "grpo_megatron.environments"
"""Entry points of other packages."""

SHIPPED = {
    "calculator": "grpo_megatron.environments.calculator:Calculator",
    "guess_number": "grpo_megatron.environments.games:GuessNumber",
    "lights_out": "grpo_megatron.environments.games:LightsOut",
    "mcp": "grpo_megatron.environments.mcp_tools:McpTools",
    "openenv": "grpo_megatron.environments.openenv:OpenEnvironment",
    "python": "grpo_megatron.environments.python:PythonInterpreter",
    "remote": "grpo_megatron.environments.remote:RemoteEnvironment",
    "search": "grpo_megatron.environments.search:Search",
    "verifiers": "grpo_megatron.environments.verifiers_adapter:VerifiersEnvironment",
}
"""Names of the environments that come with the package."""

_METHODS = ("reset", "step", "close")
_Factory = TypeVar("_Factory", bound=Callable[..., Any])


def _takes_all(**_: object) -> None:
    """Refuse no arguments."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a factory says of its environments; see `traits`."""

    needs: tuple[str, ...] = ()
    check: Callable[..., object] = _takes_all
    network: bool = False


def traits(
    *, needs: tuple[str, ...] = (), check: Callable[..., object] = _takes_all, network: bool = False
) -> Callable[[_Factory], _Factory]:
    """Decorate a class or function that makes environments.

    needs: modules that must be installed. `check(**arguments)` raises an error of this package
    where the recipe's arguments cannot work. network: its process may open connections."""

    def mark(factory: _Factory) -> _Factory:
        factory.environment_traits = Traits(needs, check, network)  # type: ignore[attr-defined]
        return factory

    return mark


@dataclass(frozen=True, slots=True)
class BoundEnvironment:
    """A factory with its recipe arguments."""

    name: str  # as in the recipe
    reference: str  # "module:function"
    factory: Callable[..., Environment]
    arguments: Mapping[str, Any] = field(repr=False)  # with secrets
    network: bool

    def make(self) -> Environment:
        """Return an environment for one episode."""
        return self.factory(**self.arguments)


def bind(name: str, arguments: Mapping[str, Any]) -> BoundEnvironment:
    """Find the environment; EpisodeError where there is none, it cannot be imported, it cannot be
    made with these arguments, or its check refuses them.

    Secrets that arguments name by a variable of the environment, `"$NAME"`, are looked up."""
    reference = reference_of(name)
    factory = imported(reference, EpisodeError, "environment")
    of_factory = getattr(factory, "environment_traits", Traits())
    for module in of_factory.needs:
        with raised_as(
            EpisodeError, f"environment {name} needs {module}", remedy=f"install {module}"
        ):
            importlib.import_module(module)
    _refuse_strange_arguments(name, factory, arguments)
    _refuse_missing_methods(name, factory)
    try:
        arguments = with_secrets(arguments)
        of_factory.check(**arguments)
    except GrpoMegatronError as error:
        raise EpisodeError(
            f"environment {name}: {error.message}", where=error.where, remedy=error.remedy
        ) from error
    except Exception as error:
        raise EpisodeError(
            f"environment {name} cannot work with its arguments: {type(error).__name__}: {error}",
            remedy="give each argument a value of its type",
        ) from error
    return BoundEnvironment(name, reference, factory, arguments, of_factory.network)


def reference_of(name: str) -> str:
    """Return the `module:function` of a name. Raises EpisodeError where nothing is called so, or
    two packages register it."""
    if ":" in name:
        return name
    if name in SHIPPED:
        return SHIPPED[name]
    found = [point.value for point in entry_points(group=GROUP, name=name)]
    distinct = list(dict.fromkeys(found))
    if not distinct:
        raise EpisodeError(
            f"no environment is called {name!r}",
            remedy=f"{did_you_mean(name, known_names())} (one of your own is module:function)",
        )
    if len(distinct) > 1:
        raise EpisodeError(
            f"two packages register an environment {name!r}: {' and '.join(distinct)}",
            remedy=f"name one of them in full: {distinct[0]!r}",
        )
    return distinct[0]


def known_names() -> list[str]:
    """Return all names, sorted: shipped ones and entry points."""
    names = set(SHIPPED)
    for point in entry_points(group=GROUP):
        names.add(point.name)
    return sorted(names)


def _refuse_strange_arguments(
    name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none: nothing to check
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        strange = [key for key in arguments if key not in signature.parameters]
        remedy = "give it the arguments that it requires"
        if strange:
            known = did_you_mean(strange[0], signature.parameters)
            remedy = f"{strange[0]!r} is not an argument of it. {known}"
        raise EpisodeError(
            f"environment {name}{signature} cannot be made: {error}", remedy=remedy
        ) from error


def _refuse_missing_methods(name: str, factory: Callable[..., Any]) -> None:
    """Refuse a class without the methods of an environment; what a function returns is seen when it
    is called."""
    if not inspect.isclass(factory):
        return
    for method in _METHODS:
        if not inspect.iscoroutinefunction(getattr(factory, method, None)):
            raise EpisodeError(
                f"environment {name} has no `async def {method}`",
                remedy="see grpo_megatron/environments/protocol.py for the three methods",
            )
