"""Functions of an objective that are not part of this package.

`objective.advantage`, `objective.clip` and `objective.aggregation` take `module:function` in the
place of a name. Such a function has the signature of the registered ones:

    advantage    (o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> float64 [N]
    clip         (o: ObjectiveConfig, inputs: ClipInputs) -> [n], to be maximised, with gradient
    aggregation  (o: ObjectiveConfig, lengths: Lengths) -> float64 [N], a weight per token

N samples with n policy tokens. `SampleBatch` and `ClipInputs` are in `algorithms.batch`, `Groups`
in `algorithms.groups`, `Lengths` in `algorithms.aggregation`. A function must give the same numbers
on every rank and for every split into micro-batches: no state, no randomness, no order of samples.

A clip that removes the gradient of some tokens says which with `holds`; an advantage that reads
token columns names them with `needs_columns`.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from grpo_megatron.config.imports import imported
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.errors import ConfigError, GrpoMegatronError

PARAMETERS = {
    "advantage": ("o", "batch", "groups"),
    "clip": ("o", "inputs"),
    "aggregation": ("o", "lengths"),
}
"""Choices of `[objective]` that take a function, and what it is called with."""
_SIGNATURES = "grpo_megatron/algorithms/custom.py has the signatures"
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)
"""What a function with a mistake in it raises; RuntimeError, which torch raises for shapes too,
counts where it is no subclass: that of a full device is one."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_custom(choice: str) -> bool:
    """Whether a choice names a function and not one of ours."""
    return ":" in choice


def function_of(axis: str, choice: str, registered: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the function of a choice, registered or imported.

    Raises ConfigError where it cannot be imported, or not be called as a function of this axis."""
    if is_custom(choice):
        return _imported(axis, choice)
    return registered[choice]


def result_of(
    axis: str, choice: str, registered: Mapping[str, Callable[..., Any]], *inputs: Any
) -> Any:
    """Return what the function of a choice gives for `inputs`.

    Raises ConfigError for one of one's own: as `function_of`, or where it raises."""
    function = function_of(axis, choice, registered)
    if not is_custom(choice):
        return function(*inputs)
    try:
        return function(*inputs)
    except GrpoMegatronError:
        raise
    except Exception as error:
        if not isinstance(error, _MISTAKES) and type(error) is not RuntimeError:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{choice} raised {type(error).__name__}: {error}\n"
            f"  at:     {last.filename}:{last.lineno}: {last.line}",
            where=_where(axis, choice),
            remedy=f"correct the function; {_SIGNATURES}",
        ) from error


def needs_columns(*names: str) -> Callable[[_Function], _Function]:
    """Decorate an advantage that reads token columns of the batch: `token_ids`, `entropies`,
    `old_logprobs`, `squared_probs` ([n] each, in `batch.tokens`), which the trainer computes only
    where asked."""

    def mark(function: _Function) -> _Function:
        function.needed_columns = names  # type: ignore[attr-defined]
        return function

    return mark


def holds(
    status: Callable[..., Mapping[str, Any]], *, plain_elsewhere: bool = False
) -> Callable[[_Function], _Function]:
    """Decorate a clip that removes the gradient of some tokens, or bounds their weight, with what
    says which: `status(o, inputs)` is bool [n] by the name of a side ("low", "high"). They are
    counted in `clip/*` and recorded with the step. A smooth clip needs none.

    plain_elsewhere: the clip removes the gradient of these tokens and is `r A` for all others, so
    that a replay can follow what was recorded; else it decides anew for tokens at the bound."""

    def mark(function: _Function) -> _Function:
        function.clip_status = status  # type: ignore[attr-defined]
        function.plain_elsewhere = plain_elsewhere  # type: ignore[attr-defined]
        return function

    return mark


def columns_of(choice: str) -> Sequence[str]:
    """Return what `needs_columns` said of an advantage; nothing of a registered one."""
    if not is_custom(choice):
        return ()
    return getattr(_imported("advantage", choice), "needed_columns", ())


def require_shape(axis: str, choice: str, found: Any, wanted: Sequence[int]) -> None:
    """Raise ConfigError where a function returned no tensor or array, or one of another shape."""
    wanted = tuple(wanted)
    what = f"{type(found).__name__}, wanted is a tensor of the shape {wanted}"
    if hasattr(found, "shape"):
        if tuple(found.shape) == wanted:
            return
        what = f"the shape {tuple(found.shape)}, wanted is {wanted}"
    raise ConfigError(f"{choice} returned {what}", where=_where(axis, choice), remedy=_SIGNATURES)


def require_gradient(choice: str, has_gradient: bool) -> None:
    """Raise ConfigError where a clip returned numbers that do not depend on the policy: a run with
    it would learn nothing, and say nothing."""
    if has_gradient:
        return
    raise ConfigError(
        f"{choice} returned a tensor without gradient: the policy would not learn",
        where=_where("clip", choice),
        remedy="compute it from inputs.log_ratio or inputs.logprobs, not detached",
    )


def import_functions(o: ObjectiveConfig) -> None:
    """Import every function that the objective names; ConfigError for the first that fails, or
    cannot be called as the trainer does."""
    for axis in PARAMETERS:
        choice = getattr(o, axis)
        if is_custom(choice):
            _imported(axis, choice)


def _where(axis: str, choice: str) -> str:
    return f"objective.{axis} = {choice!r}"


@cache
def _imported(axis: str, choice: str) -> Callable[..., Any]:
    try:
        function = imported(choice, ConfigError, axis)
    except ConfigError as error:
        error.where = _where(axis, choice)
        raise
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none: nothing to check
        return function
    try:
        signature.bind(*PARAMETERS[axis])
    except TypeError as error:
        raise ConfigError(
            f"{choice}{signature} cannot be called: {error}",
            where=_where(axis, choice),
            remedy=f"write def {choice.partition(':')[2]}({', '.join(PARAMETERS[axis])}); "
            + _SIGNATURES,
        ) from error
    return function
