"""Copies between host and device, and where memory of the host is."""

from collections.abc import Callable
from typing import Any

import torch

from grpo_megatron.pretended_cuda import in_flight, pinned
from grpo_megatron.pretended_cuda.current import as_device
from grpo_megatron.pretended_cuda.synchronisations import FROM_HOST, TO_HOST, note
from grpo_megatron.pretended_cuda.tensor import PretendedTensor, data_of

aten: Any = torch.ops.aten


def _to_copy(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)`, where it makes a copy."""
    asked = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    asks_for_pinned = kwargs.pop("pin_memory", None)
    target = _device_of_copy(tensor, asked)
    is_from_device = isinstance(tensor, PretendedTensor)
    if target is not None and not is_from_device:
        in_flight.finish()  # in the order of the queue
    source = data_of(tensor)
    made: torch.Tensor = aten._to_copy.default(source, **kwargs)
    is_converted = made.dtype != source.dtype
    if target is not None:
        if not is_from_device:
            _note_from_host(tensor, is_converted, non_blocking)
        return PretendedTensor(made, target)
    if non_blocking and is_from_device:
        asks_for_pinned = True  # torch takes pinned memory then
    if asks_for_pinned:
        pinned.mark(made)
    if is_from_device:
        _arrive_on_host(made, made, waits=is_converted or not non_blocking)
    return made


def _device_of_copy(tensor: torch.Tensor, asked: Any) -> torch.device | None:
    """Say where a copy of `tensor` is; None: on the host."""
    if asked is not None:
        return as_device(asked)
    if isinstance(tensor, PretendedTensor):
        return tensor.device
    return None


def _arrive_on_host(target: torch.Tensor, values: torch.Tensor, *, waits: bool) -> None:
    """Copy what a device had to the host, now or at the next wait."""
    if waits:
        note(TO_HOST)
        if target is not values:
            aten.copy_.default(target, values)
    else:
        in_flight.begin(target, values.clone())


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)`, between any two places."""
    is_converted = target.dtype != source.dtype
    is_to_device = isinstance(target, PretendedTensor)
    is_from_device = isinstance(source, PretendedTensor)
    if is_from_device and not is_to_device:
        is_direct = target.is_contiguous() and not is_converted
        waits = not (non_blocking and is_direct and pinned.is_pinned(target))
        _arrive_on_host(target, data_of(source).expand_as(target), waits=waits)
        return target
    if is_to_device and not is_from_device:
        in_flight.finish()  # in the order of the queue
        _note_from_host(source, is_converted, non_blocking)
    aten.copy_.default(data_of(target), data_of(source))
    return target


def _note_from_host(source: torch.Tensor, is_converted: bool, non_blocking: bool) -> None:
    """A conversion happens on the host, in memory that is not pinned."""
    is_direct = source.is_contiguous() and not is_converted
    if not (non_blocking and is_direct and pinned.is_pinned(source)):
        note(FROM_HOST)


def _pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if isinstance(tensor, PretendedTensor):
        raise RuntimeError(f"cannot pin a tensor on {tensor.device}: only the host's can be pinned")
    return pinned.mark(tensor.clone())


def _is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, PretendedTensor) and pinned.is_pinned(tensor)


COPIES: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
}
