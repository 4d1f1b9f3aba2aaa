"""Tensors on the wire or in a file: names, types, shapes, digests."""

import math
from collections.abc import Iterable

import msgspec
import torch
import xxhash

ALIGNMENT = 16
"""What is sent starts at multiples of this many bytes, so that it is used where it arrived."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One Hugging Face tensor on the wire or in a file."""

    name: str
    dtype: str  # "bfloat16", as in torch.bfloat16
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor alone, without alignment."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def grouped(sizes: Iterable[int], limit: int, alignment: int = 1) -> list[dict[int, int]]:
    """Group consecutive items of `sizes` up to `limit`; a larger item is alone.

    A group maps the numbers of its items to where each starts, a multiple of `alignment`."""
    groups: list[dict[int, int]] = []
    end = 0
    for index, size in enumerate(sizes):
        start = -(-end // alignment) * alignment
        if not groups or start + size > limit:
            groups.append({})
            start = 0
        groups[-1][index] = start
        end = start + size
    return groups


def entry_of(name: str, tensor: torch.Tensor) -> TensorEntry:
    """Describe a tensor as a plan or a file does."""
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits of dtype, shape and bytes.

    They are the same in every process and on every device. A contiguous CPU tensor is not copied.
    XXH3-128 hashes 3 GB/s a core and more, and guards against accidents, not an adversary."""
    dtype = dtype_name(tensor.dtype)
    sizes = ",".join(map(str, tensor.shape))
    state = xxhash.xxh3_128(f"{dtype}:{sizes};".encode())
    state.update(as_bytes(tensor.detach().cpu().contiguous()))
    return state.hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Expose the storage of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
