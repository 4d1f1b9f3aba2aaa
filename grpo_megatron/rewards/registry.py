"""From `module:function` in a recipe to a checked function. Light: workers import it too."""

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any, TypeVar

from grpo_megatron.config.imports import ENVIRONMENT_REWARD, imported
from grpo_megatron.config.secret_values import with_secrets
from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.errors import ConfigError, GrpoMegatronError, RewardError, raised_as

TEXTS = ("completion", "answer")
"""What every reward takes: by these names, or else as the first two."""
CONTEXT = ("prompt", "metadata", "num_tokens", "truncated", "token_ids", "outcome")
"""Keyword arguments that the pool offers; a reward takes those that its signature names.
`**arguments` takes the first two: the others would be sent to processes for nothing."""

_OF_MANY = {"completions": "completion", "answers": "answer", "prompts": "prompt"}
"""Names of parameters of a function that is called for many completions at once, as TRL's are."""
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
    by_place: tuple[str, ...] = TEXTS
    """Which of TEXTS a call passes by place, in this order; the others go by name."""

    @property
    def is_async(self) -> bool:
        """Whether calls are known to be coroutines, which a process runs several of at a time. What
        a plain function returns may be one too: its first call shows that (`reward_worker`)."""
        of_object = type(self.function).__call__
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(of_object)

    def __call__(self, completion: str, answer: str, context: Mapping[str, Any]) -> Any:
        """Return what the function returns, for `to_float`; `context`: by name in `CONTEXT`. The
        recipe's arguments are copies, which it may change."""
        offered = {key: context[key] for key in self.context}
        arguments = copy.deepcopy(dict(self.arguments))
        texts = {"completion": completion, "answer": answer}
        in_order = [texts.pop(name) for name in self.by_place]
        return self.function(*in_order, **texts, **offered, **arguments)


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
    taken = [key for key in arguments if key in (*TEXTS, *CONTEXT)]
    if taken:
        raise RewardError(
            f"reward {reference}: argument {taken[0]!r} is the pool's own",
            remedy="rename the argument",
        )
    context = tuple(key for key in CONTEXT if _takes(signature, key))
    by_place = _texts_by_place(reference, signature, context, arguments)
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
    return BoundReward(reference, function, arguments, context, by_place)


def _texts_by_place(
    reference: str,
    signature: inspect.Signature,
    context: Sequence[str],
    arguments: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return which of TEXTS a call passes by place, in order, so that a parameter with the name of
    one gets that one. Raises RewardError where no call fits the signature.

    By place first: what a decorator calls is not always named as its signature says."""
    named = _named_texts(signature)
    ways: list[tuple[str, ...]] = [TEXTS]
    answer = signature.parameters.get("answer")
    is_answer_apart = answer is not None and answer.kind is inspect.Parameter.KEYWORD_ONLY
    if len(named) == len(TEXTS) or is_answer_apart:
        ways.append(_without_keyword(signature, named))
    marks = {name: object() for name in TEXTS}
    what = ""
    remedy = ""
    for by_place in ways:
        in_order = [marks[name] for name in by_place]
        by_name = {name: marks[name] for name in TEXTS if name not in by_place}
        try:
            bound = signature.bind(*in_order, **by_name, **dict.fromkeys(context), **arguments)
        except TypeError as error:
            what = str(error)
            remedy = _remedy(signature, named, arguments)
            continue
        for text, mark in marks.items():
            _refuse_another_text(reference, signature, bound.arguments, text, mark)
        misplaced = [name for name in named if bound.arguments.get(name) is not marks[name]]
        if not misplaced:
            return by_place
        what = f"its parameter {misplaced[0]!r} would not get the {misplaced[0]}"
        remedy = (
            "name one `completion` and the other `answer`, or let the first be the completion and "
            "the second the answer"
        )
    raise RewardError(f"reward {reference}{signature} cannot be called: {what}", remedy=remedy)


def _refuse_another_text(
    reference: str,
    signature: inspect.Signature,
    given: Mapping[str, Any],
    text: str,
    mark: object,
) -> None:
    """Refuse a parameter of `_OF_MANY` that would get one of TEXTS by place whose name it is not.
    given: by parameter; mark: what stands for `text` there."""
    for name, singular in _OF_MANY.items():
        if given.get(name) is mark and singular != text:
            raise RewardError(
                f"reward {reference}{signature} cannot be called: its parameter {name!r} would get "
                f"the {text}",
                remedy="a call is for one completion: name its parameters `completion`, `answer` "
                "and `prompt`",
            )


def _named_texts(signature: inspect.Signature) -> list[str]:
    """Return those of TEXTS that are names of parameters, in the order of the signature."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = []
    for parameter in signature.parameters.values():
        if parameter.name in TEXTS and parameter.kind not in variadic:
            named.append(parameter.name)
    return named


def _without_keyword(signature: inspect.Signature, named: Sequence[str]) -> tuple[str, ...]:
    """Return those of TEXTS that cannot be passed by name: a completion that has none, and what is
    named by parameters of places alone."""
    found = []
    if "completion" not in named:
        found.append("completion")
    for name in named:
        if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            found.append(name)
    return tuple(found)


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


def _remedy(
    signature: inspect.Signature, named: Sequence[str], arguments: Mapping[str, Any]
) -> str:
    """Return what to do about a signature that these arguments do not fit. named: of TEXTS."""
    others = [value for name, value in signature.parameters.items() if name not in named]
    num_texts = len(TEXTS) - len(named)
    own = others[num_texts:]  # the first are texts by another name
    strange = [key for key in arguments if key not in signature.parameters]
    if strange:
        known = [parameter.name for parameter in own if parameter.name not in CONTEXT]
        return f"{strange[0]!r} is not an argument of it. {did_you_mean(strange[0], known)}"
    for parameter in own:
        is_missing = parameter.name not in arguments and parameter.name not in CONTEXT
        if not is_missing or not _is_required(parameter):
            continue
        name = parameter.name
        if name in _OF_MANY:
            return f"a call is for one completion: name it {_OF_MANY[name]!r}, which it offers"
        remedy = f"set it in the recipe: arguments = {{ {name} = … }}"
        unnamed = [text for text in TEXTS if text not in named]
        offered = nearest(name, (*unnamed, *CONTEXT), count=1)
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
    is_complex = isinstance(value, Complex) and not isinstance(value, Real)
    if is_complex:  # numpy's would lose its imaginary part
        raise TypeError(f"a reward must return a real number, not {value!r}")
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
