"""Operators on tensors without numbers, computed once for every combination of sizes.

Layers of a model are alike, so nearly every operator has been asked before; torch takes up to a
millisecond to answer on the meta device."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

Operation = Any
"""An overload of torch's operators; torch has no name for its type."""

_NEW = "new"
_CHANGED = "changed"


class Shapes:
    """Remembers what operators gave."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def compute(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `operation` gives for tensors that are all on the meta device."""
        kind = _kind_of(operation)
        if kind is None:
            return operation(*args, **kwargs)
        try:
            key = (operation, _key_of(args), _key_of(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:  # of an argument that cannot be a key
            return operation(*args, **kwargs)
        if known is not None:
            return _again(known, args)
        found = operation(*args, **kwargs)
        if kind == _CHANGED:
            self._known[key] = _CHANGED
        elif isinstance(found, torch.Tensor):
            self._known[key] = (tuple(found.shape), found.stride(), found.dtype)
        return found


@cache
def _kind_of(operation: Operation) -> str | None:
    """Say whether all results are new tensors, or the first argument is changed and returned; None:
    neither, as for a view."""
    schema = operation._schema
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema.arguments
    ]
    aliased = [argument.alias_info is not None for argument in schema.arguments]
    if not any(aliased):
        return _NEW
    is_in_place = written[:1] == [True] and sum(aliased) == 1 and len(schema.returns) == 1
    if is_in_place and schema.returns[0].alias_info is not None:
        return _CHANGED
    return None


def _key_of(value: Any) -> Any:
    """Sizes, strides and type in the place of a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_key_of(one) for one in value)
    return value if value is None or isinstance(value, torch.dtype) else (type(value), value)


def _again(known: Any, args: Sequence[Any]) -> Any:
    """Make the result anew, or return the argument that was changed."""
    if known == _CHANGED:
        return args[0]
    shape, strides, dtype = known
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
