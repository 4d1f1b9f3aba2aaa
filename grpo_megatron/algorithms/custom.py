"""Functions of an objective that are not part of this package.

`objective.advantage`, `objective.clip` and `objective.aggregation` take `module:function` in the
place of a name. Such a function has the signature of the registered ones:

    advantage    (o: ObjectiveConfig, batch: SampleBatch, groups: Groups) -> float64 [N]
    clip         (o: ObjectiveConfig, inputs: ClipInputs) -> [n], to be maximised, with gradient
    aggregation  (o: ObjectiveConfig, lengths: Lengths) -> float64 [N], a weight per token

N samples with n policy tokens. `SampleBatch` and `ClipInputs` are in `algorithms.batch`, `Groups`
in `algorithms.groups`, `Lengths` in `algorithms.aggregation`. A function must give the same numbers
on every rank and for every split into micro-batches: no state, no randomness, no order of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from grpo_megatron.config.imports import imported
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.errors import ConfigError

AXES = ("advantage", "clip", "aggregation")
"""Choices of `[objective]` that take a function."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_custom(choice: str) -> bool:
    """Whether a choice names a function and not one of ours."""
    return ":" in choice


def function_of(axis: str, choice: str, registered: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the function of a choice, registered or imported.

    Raises ConfigError where it cannot be imported."""
    if is_custom(choice):
        return _imported(axis, choice)
    return registered[choice]


def needs_columns(*names: str) -> Callable[[_Function], _Function]:
    """Decorate an advantage that reads token columns of the batch: `token_ids`, `entropies`,
    `old_logprobs`, `squared_probs` ([n] each, in `batch.tokens`), which the trainer computes only
    where asked."""

    def mark(function: _Function) -> _Function:
        function.needed_columns = names  # type: ignore[attr-defined]
        return function

    return mark


def columns_of(choice: str) -> Sequence[str]:
    """Return what `needs_columns` said of an advantage; nothing of a registered one."""
    if not is_custom(choice):
        return ()
    return getattr(_imported("advantage", choice), "needed_columns", ())


def require_shape(what: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise ConfigError where a function returned numbers of another shape."""
    if tuple(found) == tuple(wanted):
        return
    raise ConfigError(
        f"{what} returned the shape {tuple(found)}, wanted is {tuple(wanted)}",
        where="objective",
        remedy="see grpo_megatron/algorithms/custom.py for the signatures",
    )


def import_functions(o: ObjectiveConfig) -> None:
    """Import every function that the objective names; ConfigError for the first that fails."""
    for axis in AXES:
        choice = getattr(o, axis)
        if is_custom(choice):
            _imported(axis, choice)


@cache
def _imported(axis: str, reference: str) -> Callable[..., Any]:
    try:
        return imported(reference, ConfigError, axis)
    except ConfigError as error:
        error.where = f"objective.{axis} = {reference!r}"
        raise
