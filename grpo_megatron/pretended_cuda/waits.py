"""Which operations let the host wait for a GPU: rules of torch 2.13's CUDA kernels."""

from typing import Any

import torch

from grpo_megatron.pretended_cuda.synchronisations import FROM_HOST, READ, SHAPE, note
from grpo_megatron.pretended_cuda.tensor import PretendedTensor, tensors_in

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

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
"""Take indices on the host too, and move them."""


def note_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what an operation on tensors of a device makes the host wait for."""
    kind = _WAITS.get(func)
    if kind is not None:
        note(kind)
    elif func is aten.repeat_interleave.Tensor:
        if kwargs.get("output_size") is None:
            note(SHAPE)
    elif func in INDEXING:
        _note_indexing(args)


def _note_indexing(args: tuple[Any, ...]) -> None:
    """Note what indexing waits for: a mask becomes indices, whose number the host must know;
    indices and numbers of the host are moved to the device."""
    values = args[2] if len(args) > 2 else None
    is_number = isinstance(values, torch.Tensor) and values.dim() == 0
    is_host_number = is_number and not isinstance(values, PretendedTensor)
    masks = []
    for index in tensors_in(args[1]):
        if not isinstance(index, PretendedTensor):
            note(FROM_HOST)
        elif index.dtype in (torch.bool, torch.uint8):
            masks.append(index)
    is_filled = is_host_number and len(masks) == 1 and len(tensors_in(args[1])) == 1
    if is_filled:  # becomes a masked fill
        return
    for _ in masks:
        note(SHAPE)
    if is_host_number:
        note(FROM_HOST)
