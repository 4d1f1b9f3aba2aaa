"""Each operation of torch, computed on the CPU for tensors that say they are on a GPU.

Below autograd every operation arrives here. It is refused where a GPU would refuse it, what makes
the host wait is noted, and the data held by the tensors are computed with. Rules are those of
torch 2.13's CUDA kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.pretended_cuda import collectives, pinned
from grpo_megatron.pretended_cuda.copies import COPIES
from grpo_megatron.pretended_cuda.current import as_device
from grpo_megatron.pretended_cuda.kernels import STAND_INS
from grpo_megatron.pretended_cuda.tensor import PretendedTensor, data_of, tensors_in
from grpo_megatron.pretended_cuda.waits import INDEXING, note_waits

aten: Any = torch.ops.aten

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
    special = COPIES.get(func)
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
    note_waits(func, args, kwargs)
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
    for tensor in (*tensors_in(args), *tensors_in(tuple(kwargs.values()))):
        if isinstance(tensor, PretendedTensor):
            on_device.append(tensor)
        elif tensor.device.type == "cpu":
            on_host.append(tensor)
    return on_device, on_host


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
    if func in INDEXING and isinstance(args[0], PretendedTensor):
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
    indices = tensors_in(args[1])
    is_index = any(tensor is index for index in indices)
    return is_index or tensor.dim() == 0


def _held(value: Any) -> Any:
    """Return what the tensors of an argument hold, in their places."""
    return _mapped(value, data_of)


def _held_by_name(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _held(value) for name, value in values.items()}


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
