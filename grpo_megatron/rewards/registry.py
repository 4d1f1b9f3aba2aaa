"""From `module:function` in a recipe to a checked function. Light: workers import it too."""

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo_megatron.config.imports import ENVIRONMENT_REWARD, imported
from grpo_megatron.config.secret_values import with_secrets
from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.errors import ConfigError, GrpoMegatronError, RewardError, raised_as

CONTEXT = ("prompt", "metadata", "num_tokens", "truncated", "token_ids", "outcome")
"""Keyword arguments that the pool offers; a reward takes those that its signature names.
`**arguments` takes the first two: the others would be sent to processes for nothing."""

_SHIPPED = "grpo_megatron.rewards.functions"
_OUTCOME = f"{_SHIPPED}:environment"
_SIGNATURE = "def reward(completion: str, answer: str, *, prompt: str, metadata, **arguments)"


@dataclass(frozen=True, slots=True)
class BoundReward:
    """A reward function with its recipe arguments and the part of CONTEXT that it takes."""

    reference: str  # "module:function"
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(repr=False)  # with secrets
    context: tuple[str, ...]

    @property
    def is_async(self) -> bool:
        """Whether calls are coroutines, which a process runs several of at a time."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, completion: str, answer: str, context: Mapping[str, Any]) -> Any:
        """Return what the function returns, for `to_float`; `context`: by name in `CONTEXT`. The
        recipe's arguments are copies, which it may change."""
        offered = {key: context[key] for key in self.context}
        arguments = copy.deepcopy(dict(self.arguments))
        return self.function(completion, answer, **offered, **arguments)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def needs(
    *modules: str, check: Callable[..., Any] = lambda **_: None
) -> Callable[[_Function], _Function]:
    """Modules that workers import before the first call, so that no call's time pays for it.
    `check(**arguments)` raises RewardError where the reward cannot work with the recipe's."""

    def mark(function: _Function) -> _Function:
        function.needs = modules, check  # type: ignore[attr-defined]
        return function

    return mark


def bind(
    reference: str, arguments: Mapping[str, Any] | None, offered: Mapping[str, Any] | None = None
) -> BoundReward:
    """Import `module:function`; RewardError where that fails, or it cannot be called as a reward
    with these arguments (None: there are none), or its check refuses them.

    `offered` are arguments that the recipe need not repeat: the function gets those that it
    requires and that `arguments` do not set. One with a default of its own keeps it: a judge's
    `max_tokens` is the length of its verdict.

    Secrets that arguments name by a variable of the environment, `"$NAME"`, are looked up.

    The current directory is searched last, so that a file beside the recipe needs no package."""
    if reference == ENVIRONMENT_REWARD:
        reference = _OUTCOME
    _refuse_no_reference(reference)
    function = imported(reference, RewardError, "reward")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RewardError(
            f"the arguments of reward {reference} are {arguments!r}, not a table",
            remedy="write them by name: { name = value }",
        )
    try:
        arguments = with_secrets(arguments)
    except ConfigError as error:
        raise RewardError(f"reward {reference}: {error.message}", remedy=error.remedy) from error
    modules, check = getattr(function, "needs", ((), lambda **_: None))
    for module in modules:
        with raised_as(
            RewardError, f"reward {reference} needs {module}", remedy=f"install {module}"
        ):
            importlib.import_module(module)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none: nothing to check
        return BoundReward(reference, function, arguments, ())
    for key, value in (offered or {}).items():
        parameter = signature.parameters.get(key)
        is_required = parameter is not None and parameter.default is inspect.Parameter.empty
        if is_required and key not in arguments:
            arguments = {**arguments, key: value}
    taken = [key for key in arguments if key in CONTEXT]
    if taken:
        raise RewardError(
            f"reward {reference}: argument {taken[0]!r} is the pool's own",
            remedy="rename the argument",
        )
    context = tuple(key for key in CONTEXT if _takes(signature, key))
    try:
        signature.bind("", "", **dict.fromkeys(context), **arguments)
    except TypeError as error:
        raise RewardError(
            f"reward {reference}{signature} cannot be called: {error}",
            remedy=_remedy(signature, arguments),
        ) from error
    try:
        check(**arguments)
    except GrpoMegatronError:
        raise
    except Exception as error:
        raise RewardError(
            f"reward {reference}{signature} cannot work with its arguments: "
            f"{type(error).__name__}: {error}",
            remedy="give each argument a value of its type",
        ) from error
    return BoundReward(reference, function, arguments, context)


def _refuse_no_reference(reference: Any) -> None:
    """Refuse what is not `module:function`, with the shipped reward that is nearest."""
    if isinstance(reference, str) and ":" in reference:
        return
    shipped = importlib.import_module(_SHIPPED)
    known = []
    for name, value in vars(shipped).items():
        if hasattr(value, "needs"):
            known.append(name)
    last = str(reference).rpartition(".")[2]
    near = nearest(last, known, count=1)
    remedy = f'for example "{_SHIPPED}:exact_match"'
    if near:
        remedy = f'did you mean "{_SHIPPED}:{near[0]}"?'
    raise RewardError(f"reward {reference!r} is not `module:function`", remedy=remedy)


def _remedy(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    """Return what to do about a signature that these arguments do not fit."""
    own = list(signature.parameters.values())[2:]  # after completion and answer
    strange = [key for key in arguments if key not in signature.parameters]
    if strange:
        known = [parameter.name for parameter in own if parameter.name not in CONTEXT]
        return f"{strange[0]!r} is not an argument of it. {did_you_mean(strange[0], known)}"
    for parameter in own:
        is_missing = parameter.name not in arguments and parameter.name not in CONTEXT
        if not is_missing or not _is_required(parameter):
            continue
        name = parameter.name
        remedy = f"set it in the recipe: arguments = {{ {name} = … }}"
        offered = nearest(name, CONTEXT, count=1)
        if offered:
            remedy += f"; or did you mean {offered[0]!r}, which every call offers?"
        return remedy
    return f"a reward is {_SIGNATURE}"


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    return parameter.default is inspect.Parameter.empty and not is_variadic


def to_float(value: Any) -> float:
    """Return a reward's return value as a finite float, or NaN for NaN and None ("cannot be
    scored")."""
    if value is None:
        return math.nan
    if isinstance(value, str | bytes) or not (
        hasattr(value, "__float__") or hasattr(value, "__index__")
    ):
        raise TypeError(
            f"a reward must return a number or None, not {type(value).__name__} {str(value)[:80]!r}"
        )
    number = float(value)
    if math.isinf(number):
        raise ValueError("a reward must be finite")
    return number


def _takes(signature: inspect.Signature, key: str) -> bool:
    if key in signature.parameters:
        return signature.parameters[key].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
    if key not in CONTEXT[:2]:
        return False
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds
