"""A tensor of a checkpoint that is not here as a whole, as vLLM's weight loaders are given one.

Loaders narrow, view and unbind what they are given, then copy it into a parameter. A
`CheckpointTensor` goes along with the views, of which it keeps the geometry only, and asks its
source at the copy: a recording source notes the part that is wanted, a received one has it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from grpo_megatron.weights.boxes import Box, box_of_view

VIEWS: frozenset[Any] = frozenset(
    {
        torch.Tensor.narrow,
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.Tensor.__getitem__,
        torch.Tensor.unsqueeze,
        torch.Tensor.squeeze,
        torch.Tensor.transpose,
        torch.Tensor.t,
        torch.Tensor.permute,
        torch.Tensor.flatten,
        torch.Tensor.contiguous,
        torch.Tensor.chunk,
        torch.Tensor.split,
        torch.Tensor.unbind,
        torch.chunk,
        torch.split,
        torch.unbind,
        torch.narrow,
    }
)
"""What a loader may do to a tensor whose numbers are elsewhere."""


class NeedsNumbersError(NotImplementedError):
    """A loader wants to compute with a tensor, not only to copy a part of it. `name` says which."""

    def __init__(self, name: str, operation: object):
        super().__init__(f"the loader of {name!r} calls {operation} on it")
        self.name = name


class Source(Protocol):
    """Where the numbers of checkpoint tensors come from."""

    def copy_into(self, parameter: torch.Tensor, wanted: "CheckpointTensor") -> None:
        """Fill `parameter` (a view of one, of the shape of `wanted`)."""


class CheckpointTensor(torch.Tensor):
    """A view of the checkpoint tensor `tensor_name`, without numbers.

    Made by `checkpoint_tensor`; views of it are made by torch's own methods."""

    tensor_name: str
    tensor_shape: tuple[int, ...]
    tensor_dtype: torch.dtype
    geometry: torch.Tensor
    source: Source

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Follow views, hand a copy to the source; the rest sees shape and type only."""
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and isinstance(args[1], cls):
            args[1].source.copy_into(args[0], args[1])
            return args[0]
        if func in VIEWS and isinstance(args[0], cls):
            return args[0]._followed(func, args[1:], kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse everything that needs the numbers."""
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, cls):
                raise NeedsNumbersError(argument.tensor_name, func)
        return func(*args, **(kwargs or {}))

    @property
    def box(self) -> Box | None:
        """The part of the checkpoint tensor that this view shows.

        None where it is no box, or not in the tensor's order."""
        return box_of_view(
            self.tensor_shape,
            self.geometry.shape,
            self.geometry.stride(),
            int(self.geometry.storage_offset()),
        )

    def _followed(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a view operation: another view, or a tuple of them."""
        with torch._C.DisableTorchFunctionSubclass():
            seen = func(self.geometry, *args, **kwargs)
        if isinstance(seen, torch.Tensor):
            return self._child(seen, func)
        return tuple(self._child(view, func) for view in seen)

    def _child(self, geometry: torch.Tensor, func: Callable[..., Any]) -> "CheckpointTensor":
        if not _share_storage(geometry, self.geometry):  # `reshape` had to copy
            raise NeedsNumbersError(self.tensor_name, func)
        return _wrapped(
            self.tensor_name, self.tensor_shape, self.tensor_dtype, geometry, self.source
        )


def checkpoint_tensor(
    name: str, shape: Sequence[int], dtype: torch.dtype, source: Source
) -> CheckpointTensor:
    """Make the whole checkpoint tensor `name`, whose numbers `source` has."""
    geometry = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return _wrapped(name, tuple(shape), dtype, geometry, source)


def _wrapped(
    name: str,
    tensor_shape: tuple[int, ...],
    tensor_dtype: torch.dtype,
    geometry: torch.Tensor,
    source: Source,
) -> CheckpointTensor:
    made: CheckpointTensor = torch.Tensor._make_wrapper_subclass(
        CheckpointTensor, geometry.shape, dtype=geometry.dtype, device=torch.device("cpu")
    )
    made.tensor_name = name
    made.tensor_shape = tensor_shape
    made.tensor_dtype = tensor_dtype
    made.geometry = geometry
    made.source = source
    return made


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
