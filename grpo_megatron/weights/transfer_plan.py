"""Tensors on the wire or in a file: names, dtypes, shapes, digests, and how they form buckets."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import torch
import xxhash

ALIGNMENT = 16
"""Tensors start at multiples of this many bytes, so that a received one is a view of its bucket."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One Hugging Face tensor on the wire or in a file."""

    name: str
    dtype: str  # "bfloat16", as in torch.bfloat16
    shape: tuple[int, ...]
    sender: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor alone, without alignment."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one message, with the byte at which each starts."""

    entries: tuple[TensorEntry, ...]
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the message, alignment between tensors included."""
        return self.offsets[-1] + self.entries[-1].num_bytes

    def views(self, data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Name the tensors inside `data` (uint8 [num_bytes]), whose storage they share."""
        found = []
        for entry, start in zip(self.entries, self.offsets, strict=True):
            own = data[start : start + entry.num_bytes]
            found.append((entry.name, own.view(entry.torch_dtype).view(entry.shape)))
        return found


class TransferPlan(msgspec.Struct, frozen=True):
    """All tensors of a publish, in sending order within each sender.

    Both sides derive the same buckets from it; a tensor of more than `bucket_bytes` travels alone.
    Raises ValueError where a tensor occurs twice, or names a sender that there is not."""

    entries: tuple[TensorEntry, ...]
    num_senders: int = 1
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        seen = set()
        twice = set()
        stray = []
        for entry in self.entries:
            if entry.name in seen:
                twice.add(entry.name)
            seen.add(entry.name)
            if not 0 <= entry.sender < self.num_senders:
                stray.append(entry.name)
        if twice:
            raise ValueError(
                f"tensors occur twice in the transfer plan: {', '.join(sorted(twice))}"
            )
        if stray:
            raise ValueError(f"no such sender (of {self.num_senders}): {', '.join(stray)}")

    def of_sender(self, sender: int) -> tuple[TensorEntry, ...]:
        """Select what one sender sends, in order."""
        return tuple(entry for entry in self.entries if entry.sender == sender)

    def buckets(self, sender: int) -> list[Bucket]:
        """Divide what one sender sends into messages of at most `bucket_bytes`."""
        own = self.of_sender(sender)
        buckets = []
        for group in grouped([entry.num_bytes for entry in own], self.bucket_bytes, ALIGNMENT):
            entries = tuple(own[number] for number in group)
            buckets.append(Bucket(entries, tuple(group.values())))
        return buckets


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


def entry_of(name: str, tensor: torch.Tensor, sender: int = 0) -> TensorEntry:
    """Describe a tensor as a plan or a file does."""
    return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sender)


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits of dtype, shape and bytes.

    They are the same in every process and on every device. A contiguous CPU tensor is not copied.
    XXH3-128 hashes 3 GB/s a core and more, and guards against accidents, not an adversary."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = ",".join(map(str, tensor.shape))
    state = xxhash.xxh3_128(f"{dtype}:{sizes};".encode())
    state.update(as_bytes(tensor.detach().cpu().contiguous()))
    return state.hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Expose the storage of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
