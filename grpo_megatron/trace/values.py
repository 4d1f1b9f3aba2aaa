"""Which numbers exist in a trace, and what stands for those that do not.

What is on the device lies on torch's meta device: sizes and types, no numbers. Whole numbers that
code made up itself (lengths, counts, positions) are known all the same, as small tensors of a CPU,
so that what follows from lengths is what would follow on a GPU. Unknown numbers that somebody asks
for are 1, and True."""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from grpo_megatron.trace.shapes import Operation, Shapes

DEVICE = torch.device("meta")
"""Stands for the accelerator."""
_HOST = torch.device("cpu")
_MOST_KNOWN = 1 << 20
"""Elements of a tensor on the host that is made in memory; a larger one has no numbers either."""
_MOST_WHOLE = 1 << 26
"""The same of whole numbers, wherever they are."""

aten = torch.ops.aten

_Storages = dict[int, weakref.ref[Any]]
"""Storages that live, by address."""


class Values:
    """Computes operators on known and unknown tensors."""

    def __init__(self) -> None:
        self._shapes = Shapes()
        self.of_device: _Storages = {}
        """Of known tensors that lie on the device."""
        self.of_host: _Storages = {}
        """Of unknown tensors that lie on the host."""

    def compute(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `operation` answers, as far as it is known."""
        tensors = tensors_in((*args, *kwargs.values()))
        asked = kwargs.get("device")
        if not tensors:
            return self._create(operation, args, dict(kwargs))
        num_unknown = sum(tensor.is_meta for tensor in tensors)
        if num_unknown == 0:
            return self._compute_known(operation, args, kwargs, tensors)
        answer = _ANSWERS.get(operation)
        if answer is not None:
            return answer(self, *args, **kwargs)
        if asked is not None and torch.device(asked) != DEVICE:
            return self._to_host(operation, args, dict(kwargs))
        if num_unknown == len(tensors):
            return self._shapes.compute(operation, args, kwargs)
        changed = _changed_argument(operation, args, kwargs)
        if changed is not None and not changed.is_meta:
            return changed  # it would take on numbers that nobody knows
        return self._compute_unknown(operation, args, kwargs)

    # --- the three cases

    def _create(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a tensor out of nothing: whole numbers in memory, others without numbers."""
        if not _has_device(operation):
            return operation(*args, **kwargs)
        asked = kwargs.get("device")
        if asked is None or torch.device(asked) != DEVICE:
            found = _shape_of(operation, args, kwargs)
            most = _MOST_KNOWN
            if _is_whole(found):
                most = _MOST_WHOLE
            if isinstance(found, torch.Tensor) and found.numel() > most:
                return self._mark(found, self.of_host)
            return operation(*args, **kwargs)
        shape = operation(*args, **kwargs)
        if not _is_whole(shape) or shape.numel() > _MOST_WHOLE:
            return shape
        kwargs["device"] = _HOST
        return self._mark(operation(*args, **kwargs), self.of_device)

    def _compute_known(
        self,
        operation: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked) == DEVICE
        if to_device:
            shape = operation(*args, **kwargs)
            if not _is_whole(shape):
                return shape
            kwargs = {**kwargs, "device": _HOST}
        found = operation(*args, **kwargs)
        lies_on_device = to_device
        if asked is None and not lies_on_device:
            lies_on_device = any(_storage_of(tensor) in self.of_device for tensor in tensors)
        if lies_on_device:
            for tensor in tensors_in((found,)):
                self._mark(tensor, self.of_device)
        return found

    def _compute_unknown(
        self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _without_numbers, (args, kwargs))
        return self._shapes.compute(operation, args, kwargs)

    def _to_host(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Copy to the host, or make a tensor like another one there: all ones."""
        kwargs.pop("pin_memory", None)
        kwargs["device"] = DEVICE
        unknown = self._compute_unknown(operation, args, kwargs)
        if unknown.numel() > _MOST_KNOWN:
            return self._mark(unknown, self.of_host)
        return torch.ones(unknown.shape, dtype=unknown.dtype)

    # --- where tensors are

    def lies_on_device(self, tensor: torch.Tensor) -> bool:
        """Say whether the accelerator would hold this tensor."""
        storage = _storage_of(tensor)
        if tensor.is_meta:
            return storage not in self.of_host
        return storage in self.of_device

    def _mark(self, tensor: torch.Tensor, storages: _Storages) -> torch.Tensor:
        """Put its storage into `storages` until that ends: another may get the address."""
        storage = tensor.untyped_storage()
        address: int = storage._cdata

        def end(_: Any) -> None:
            storages.pop(address, None)

        storages[address] = weakref.ref(storage, end)
        return tensor


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors among values and in lists and tuples of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _is_whole(tensor: Any) -> bool:
    """Whether it holds whole numbers or truth values."""
    return isinstance(tensor, torch.Tensor) and not (
        tensor.is_floating_point() or tensor.is_complex()
    )


def _storage_of(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same shape, strides and type on the device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)


@cache
def _has_device(operation: Operation) -> bool:
    """Whether it makes a tensor on a device that may be named."""
    return any(argument.name == "device" for argument in operation._schema.arguments)


def _shape_of(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a factory makes, without its memory."""
    return operation(*args, **{**kwargs, "device": DEVICE, "pin_memory": False})


def _changed_argument(
    operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the first tensor that the operator writes to."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name)
        if position < len(args):
            value = args[position]
        if isinstance(value, torch.Tensor):
            return value
    return None


# --- operators of which the answer depends on numbers


def _item(values: Values, tensor: torch.Tensor) -> float | int | bool:
    """Return a number: 1 of the tensor's type."""
    if tensor.dtype == torch.bool:
        return True
    if tensor.is_floating_point():
        return 1.0
    return 1


def _copy_to(values: Values, tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
    asked = settings.get("device")
    if asked is None or torch.device(asked) == DEVICE:
        found: torch.Tensor = aten._to_copy.default(tensor, **settings)
        return found
    dtype = settings.get("dtype") or tensor.dtype
    if tensor.numel() > _MOST_KNOWN:
        copy = torch.empty(tensor.shape, dtype=dtype, device=DEVICE)
        return values._mark(copy, values.of_host)
    return torch.ones(tensor.shape, dtype=dtype)


def _equal(values: Values, first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape


def _masked_select(values: Values, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return as many elements as a known mask has; all where it is not known."""
    count = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape))
    if not mask.is_meta:
        count = int(mask.sum()) * count // max(mask.numel(), 1)
    return torch.empty(count, dtype=tensor.dtype, device=DEVICE)


def _nonzero(values: Values, tensor: torch.Tensor) -> torch.Tensor:
    """Return all of an unknown tensor."""
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=DEVICE)


def _index(
    values: Values, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Index with a mask by its positions: those of a known mask, all of one that is not known."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        elif index.is_meta:
            positions += _nonzero(values, index).unbind(1)
        else:
            positions += index.nonzero().unbind(1)
    found: torch.Tensor = values._compute_unknown(aten.index.Tensor, (tensor, positions), {})
    return found


def _bincount(
    values: Values, ids: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    return torch.empty(max(minlength, 1), dtype=torch.int64, device=DEVICE)


_ANSWERS: dict[Operation, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _item,
    aten._to_copy.default: _copy_to,
    aten.equal.default: _equal,
    aten.masked_select.default: _masked_select,
    aten.nonzero.default: _nonzero,
    aten.index.Tensor: _index,
    aten.bincount.default: _bincount,
}
"""What is answered of unknown tensors in place of the operator."""
