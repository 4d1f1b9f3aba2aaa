"""Rectangular parts of tensors, by which trainer shards are cut to what engine workers keep."""

import math
from collections.abc import Sequence

import msgspec
import torch


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The elements `start[d] <= i < start[d] + shape[d]` of a tensor, in every dimension d.

    An axis is never empty: a tensor without elements has no boxes."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Numbers inside the box."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return what both boxes of the same tensor contain; None where that is nothing."""
        start = []
        shape = []
        for mine, my_size, theirs, their_size in zip(
            self.start, self.shape, other.start, other.shape, strict=True
        ):
            first = max(mine, theirs)
            size = min(mine + my_size, theirs + their_size) - first
            if size <= 0:
                return None
            start.append(first)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` is in this box."""
        return self.intersect(other) == other

    def view_in(self, outer: "Box", held: torch.Tensor) -> torch.Tensor:
        """View this box in `held`, which has the elements of `outer` [*outer.shape].

        `outer` contains this box."""
        view = held
        for dim, size in enumerate(self.shape):
            view = view.narrow(dim, self.start[dim] - outer.start[dim], size)
        return view


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def box_of_view(
    tensor_shape: Sequence[int], view_shape: Sequence[int], strides: Sequence[int], offset: int
) -> Box | None:
    """Return the box that a view of a contiguous tensor shows, its elements in the tensor's order.

    tensor_shape: of the tensor. view_shape, strides, offset: of the view, in elements. None where
    the view shows something else than a box, or shows it in another order (transposed)."""
    if math.prod(view_shape) == 0:
        return None
    last = offset
    for size, stride in zip(view_shape, strides, strict=True):
        last += (size - 1) * stride
    tensor_strides = contiguous_strides(tensor_shape)
    start = _coordinates(offset, tensor_strides)
    stop = _coordinates(last, tensor_strides)
    shape = []
    for first, final in zip(start, stop, strict=True):
        shape.append(final - first + 1)
    if min(shape, default=1) < 1:
        return None
    if _runs(shape, tensor_strides) != _runs(view_shape, strides):
        return None
    return Box(tuple(start), tuple(shape))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return strides[::-1]


def _coordinates(index: int, strides: Sequence[int]) -> list[int]:
    """Return the coordinates of element number `index` of a contiguous tensor."""
    found = []
    for stride in strides:
        coordinate, index = divmod(index, stride)
        found.append(coordinate)
    return found


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return how the elements lie in memory: (size, stride) of axes, those joined that are one run.

    Equal for two views that begin at the same element exactly if these have the same elements in
    the same order."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
