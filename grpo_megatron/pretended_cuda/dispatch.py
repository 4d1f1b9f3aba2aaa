"""Each operation of torch, computed on the CPU for tensors that say they are on a GPU.

Below autograd every operation arrives here. It is refused where a GPU would refuse it, what makes
the host wait is noted, and the data held by the tensors are computed with. Rules are those of
torch 2.13's CUDA kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.pretended_cuda import collectives, pinned
from grpo_megatron.pretended_cuda.current import current_device
from grpo_megatron.pretended_cuda.kernels import STAND_INS
from grpo_megatron.pretended_cuda.synchronisations import FROM_HOST, READ, SHAPE, TO_HOST, note
from grpo_megatron.pretended_cuda.tensor import PretendedTensor

aten: Any = torch.ops.aten

_WAITS = {
    aten._local_scalar_dense.default: READ,
    aten.is_nonzero.default: READ,
    aten.equal.default: READ,
    aten.nonzero.default: SHAPE,
    aten.masked_select.default: SHAPE,
    aten.bincount.default: SHAPE,
    aten._unique.default: SHAPE,
    aten._unique2.default: SHAPE,
    aten.unique_dim.default: SHAPE,
    aten.unique_consecutive.default: SHAPE,
    aten.unique_dim_consecutive.default: SHAPE,
}
"""Operations that always make the host wait."""

_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
"""Take indices on the host too, and move them."""

_TAKE_HOST_NUMBERS = {
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten._foreach_mul_.Tensor,
    aten._foreach_add_.Tensor,
    aten._foreach_div_.Tensor,
}
"""Take a tensor without dimensions on the host beside those on a GPU, as pointwise ones do."""


class PretendedCuda(TorchDispatchMode):
    """While it is entered, `device="cuda"` makes `PretendedTensor`s."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler, which nothing uses here, is not even imported."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation."""
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `func` on what its tensors hold.

    Raises RuntimeError for host and device tensors in one operation, and for several devices."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    on_device, on_host = _tensors(args, kwargs)
    device = _device_of_result(on_device, kwargs)
    is_collective = func.namespace == "c10d"
    if is_collective:
        collectives.check(func, args, on_host)
    if device is None and not on_device:
        return _on_host(func, args, kwargs)
    if not is_collective:
        _check(func, args, on_device, on_host)
    _note_waits(func, args, kwargs)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_pinned = kwargs.pop("pin_memory", False)
    compute = STAND_INS.get(func, func)
    found = compute(*_held(args), **_held_by_name(kwargs))
    if func._schema.is_mutable:
        _follow_changed_shapes(on_device)
    if device is None:
        if is_pinned:
            pinned.mark(found)
        return found
    return _wrapped(found, on_device, device)


def _tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[PretendedTensor], list[torch.Tensor]]:
    """Find the tensors among the arguments: those on a device, those on the host."""
    on_device = []
    on_host = []
    for tensor in (*_tensors_in(args), *_tensors_in(tuple(kwargs.values()))):
        if isinstance(tensor, PretendedTensor):
            on_device.append(tensor)
        elif tensor.device.type == "cpu":
            on_host.append(tensor)
    return on_device, on_host


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in an argument, which may be a list of lists. torch's trees take longer."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = []
    if isinstance(value, list | tuple):
        for part in value:
            found += _tensors_in(part)
    return found


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor in an argument or a result."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [_mapped(part, change) for part in value]
    if isinstance(value, tuple):
        return tuple(_mapped(part, change) for part in value)
    return value


def _device_of_result(
    on_device: Sequence[PretendedTensor], kwargs: dict[str, Any]
) -> torch.device | None:
    """Say on which device results are; None: on the host."""
    asked = kwargs.get("device")
    if asked is not None:
        return as_device(asked)
    if on_device:
        return on_device[0].device
    return None


def as_device(device: Any) -> torch.device | None:
    """Return `device` with its index; None for what is no GPU."""
    found = torch.device(device)
    if found.type != "cuda":
        return None
    if found.index is None:
        return current_device()
    return found


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute what no device has to do with, but for memory that is said to be pinned."""
    is_pinned = kwargs.pop("pin_memory", False)
    found = func(*args, **kwargs)
    if is_pinned:
        pinned.mark(found)
    return found


def _check(
    func: Any,
    args: tuple[Any, ...],
    on_device: Sequence[PretendedTensor],
    on_host: Sequence[torch.Tensor],
) -> None:
    """Raise RuntimeError where a GPU would refuse where the tensors are."""
    strangers = on_host
    if func in _INDEXING and isinstance(args[0], PretendedTensor):
        strangers = [tensor for tensor in on_host if not _may_be_moved(tensor, args)]
    elif func in _TAKE_HOST_NUMBERS or torch.Tag.pointwise in func.tags:
        strangers = [tensor for tensor in on_host if tensor.dim() > 0]
    first = on_device[0].device if on_device else None
    is_one_device = all(tensor.device == first for tensor in on_device)
    if is_one_device and not (strangers and on_device):
        return
    places = {str(tensor.device) for tensor in (*on_device, *strangers)}
    raise RuntimeError(
        "Expected all tensors to be on the same device, but found "
        f"{', '.join(sorted(places))} in {func}"
    )


def _may_be_moved(tensor: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Say whether indexing takes it from the host: an index, or one number to be put."""
    indices = _tensors_in(args[1])
    is_index = any(tensor is index for index in indices)
    return is_index or tensor.dim() == 0


def _note_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kind = _WAITS.get(func)
    if kind is not None:
        note(kind)
    elif func is aten.repeat_interleave.Tensor:
        if kwargs.get("output_size") is None:
            note(SHAPE)
    elif func in _INDEXING:
        _note_indexing(args)


def _note_indexing(args: tuple[Any, ...]) -> None:
    """Masks become indices, of which the host must know the number; the host's are moved."""
    values = args[2] if len(args) > 2 else None
    is_number = isinstance(values, torch.Tensor) and values.dim() == 0
    is_host_number = is_number and not isinstance(values, PretendedTensor)
    masks = []
    for index in _tensors_in(args[1]):
        if not isinstance(index, PretendedTensor):
            note(FROM_HOST)
        elif index.dtype in (torch.bool, torch.uint8):
            masks.append(index)
    is_filled = is_host_number and len(masks) == 1 and len(_tensors_in(args[1])) == 1
    if is_filled:  # becomes a masked fill
        return
    for _ in masks:
        note(SHAPE)
    if is_host_number:
        note(FROM_HOST)


def _held(value: Any) -> Any:
    """What the tensors of an argument hold, in their places."""
    return _mapped(value, _data_of)


def _held_by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _held(value) for name, value in values.items()}


def _data_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, PretendedTensor):
        return tensor.held
    return tensor


def _follow_changed_shapes(on_device: Sequence[PretendedTensor]) -> None:
    """Give a tensor the sizes of its data, which an operation in place may have changed."""
    for tensor in on_device:
        if tensor.shape != tensor.held.shape:
            tensor.data = PretendedTensor(tensor.held, tensor.device)


def _wrapped(found: Any, on_device: Sequence[PretendedTensor], device: torch.device) -> Any:
    """Put results on the device; a result that is an argument is that argument."""
    known = {id(tensor.held): tensor for tensor in on_device}

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, PretendedTensor):
            return tensor
        argument = known.get(id(tensor))
        if argument is not None:
            return argument
        return PretendedTensor(tensor, device)

    return _mapped(found, wrap)


# --- operations with rules of their own: copies, and where memory is


def _to_copy(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)`, where it makes a copy."""
    asked = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    asks_for_pinned = kwargs.pop("pin_memory", None)
    source = tensor.held if isinstance(tensor, PretendedTensor) else tensor
    target = as_device(asked) if asked is not None else _device_of_result_of(tensor)
    made: torch.Tensor = aten._to_copy.default(source, **kwargs)
    is_converted = made.dtype != source.dtype
    if target is not None:
        if not isinstance(tensor, PretendedTensor):
            _note_from_host(tensor, is_converted, non_blocking)
        return PretendedTensor(made, target)
    if isinstance(tensor, PretendedTensor):
        if non_blocking:
            pinned.mark(made)  # torch takes pinned memory then
        if is_converted or not non_blocking:
            note(TO_HOST)
    if asks_for_pinned:
        pinned.mark(made)
    return made


def _device_of_result_of(tensor: torch.Tensor) -> torch.device | None:
    if isinstance(tensor, PretendedTensor):
        return tensor.device
    return None


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)`, between any two places."""
    is_converted = target.dtype != source.dtype
    to_device = isinstance(target, PretendedTensor)
    from_device = isinstance(source, PretendedTensor)
    if to_device and not from_device:
        _note_from_host(source, is_converted, non_blocking)
    elif from_device and not to_device:
        is_direct = target.is_contiguous() and not is_converted
        if not (non_blocking and is_direct and pinned.is_pinned(target)):
            note(TO_HOST)
    aten.copy_.default(_held(target), _held(source))
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


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
}
