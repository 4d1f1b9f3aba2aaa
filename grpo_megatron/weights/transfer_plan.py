"""What a publish sends: every tensor's name, dtype, shape and owner, and how they form buckets."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch

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
        return getattr(torch, self.dtype)

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
        return [(e.name, data[o : o + e.num_bytes].view(e.torch_dtype).view(e.shape))
                for e, o in zip(self.entries, self.offsets, strict=True)]


class TransferPlan(msgspec.Struct, frozen=True):
    """All tensors of a publish, in sending order within each sender.

    Both sides derive the same buckets from it: in order, a bucket is closed before the tensor that
    would take it over `bucket_bytes`; a larger tensor travels alone."""

    entries: tuple[TensorEntry, ...]
    num_senders: int = 1
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        counts = Counter(e.name for e in self.entries)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"tensors occur twice in the transfer plan: {', '.join(twice)}")
        if stray := [e.name for e in self.entries if not 0 <= e.sender < self.num_senders]:
            raise ValueError(f"no such sender (of {self.num_senders}): {', '.join(stray)}")

    def of_sender(self, sender: int) -> tuple[TensorEntry, ...]:
        return tuple(e for e in self.entries if e.sender == sender)

    def buckets(self, sender: int) -> list[Bucket]:
        groups: list[dict[TensorEntry, int]] = []  # offsets by tensor
        end = 0
        for entry in self.of_sender(sender):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if not groups or start + entry.num_bytes > self.bucket_bytes:
                groups.append({})
                start = 0
            groups[-1][entry] = start
            end = start + entry.num_bytes
        return [Bucket(tuple(group), tuple(group.values())) for group in groups]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a JSON request body."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return msgspec.convert(value, cls)


def entry_of(name: str, tensor: torch.Tensor, sender: int = 0) -> TensorEntry:
    """The entry that describes `tensor`."""
    return TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sender)
