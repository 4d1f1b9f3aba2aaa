"""Tensors on the wire or in a file: names, dtypes, shapes, digests, and how they form buckets."""

import math
from collections import Counter
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
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one message, with the byte at which each starts."""

    entries: tuple[TensorEntry, ...]
    offsets: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1] + self.entries[-1].num_bytes

    def views(self, data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors inside `data` (uint8 [num_bytes]), sharing its storage."""
        found = []
        for entry, start in zip(self.entries, self.offsets, strict=True):
            own = data[start : start + entry.num_bytes]
            found.append((entry.name, own.view(entry.torch_dtype).view(entry.shape)))
        return found


class TransferPlan(msgspec.Struct, frozen=True):
    """All tensors of a publish, in sending order within each sender. Both sides derive the same
    buckets from it; a tensor of more than `bucket_bytes` travels alone."""

    entries: tuple[TensorEntry, ...]
    num_senders: int = 1
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        counts = Counter(e.name for e in self.entries)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"tensors occur twice in the transfer plan: {', '.join(twice)}")
        stray = [e.name for e in self.entries if not 0 <= e.sender < self.num_senders]
        if stray:
            raise ValueError(f"no such sender (of {self.num_senders}): {', '.join(stray)}")

    def of_sender(self, sender: int) -> tuple[TensorEntry, ...]:
        return tuple(e for e in self.entries if e.sender == sender)

    def buckets(self, sender: int) -> list[Bucket]:
        mine = self.of_sender(sender)
        sizes = [entry.num_bytes for entry in mine]
        buckets = []
        for group in grouped(sizes, self.bucket_bytes, ALIGNMENT):
            entries = tuple(mine[number] for number in group)
            buckets.append(Bucket(entries, tuple(group.values())))
        return buckets


def grouped(sizes: Iterable[int], limit: int, alignment: int = 1) -> list[dict[int, int]]:
    """Consecutive items in groups of at most `limit` (a larger item is alone). A group maps the
    numbers of its items to where each starts, a multiple of `alignment`."""
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
    return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sender)


def digest_tensor(tensor: torch.Tensor) -> str:
    """32 hexadecimal digits of dtype, shape and bytes, the same in every process and on every
    device. A contiguous CPU tensor is not copied. XXH3-128 hashes 3 GB/s a core and more, and
    guards against accidents, not against an adversary."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    state = xxhash.xxh3_128(f"{dtype}:{','.join(map(str, tensor.shape))};".encode())
    state.update(as_bytes(tensor.detach().cpu().contiguous()))
    return state.hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
