"""Bytes that live tensors hold on the device, and when they were most."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Peak:
    """The moment of the most bytes."""

    bytes: int = 0
    place: str = ""
    """Phase, module and line of the operator that took the last of them."""
    operator: int = 0
    """How many operators came before."""
    by_owner: dict[str, int] = field(default_factory=dict)
    """Live bytes by what asked for them."""


class LiveMemory:
    """Follows storages from the operator that makes them to their end."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = Peak()
        self.by_owner: Counter[str] = Counter()
        self._alive: dict[int, weakref.ref[Any]] = {}

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Say whether a storage is counted."""
        return storage._cdata in self._alive

    def hold(self, storage: torch.UntypedStorage, owner: str) -> None:
        """Count a storage that is not counted yet, until it ends."""
        key = storage._cdata
        size = storage.nbytes()

        def end(_: Any) -> None:
            del self._alive[key]
            self.bytes -= size
            self.by_owner[owner] -= size

        self._alive[key] = weakref.ref(storage, end)
        self.bytes += size
        self.by_owner[owner] += size

    def note_peak(self, place: str, operator: int) -> None:
        """Remember this moment as the peak."""
        by_owner = {owner: size for owner, size in self.by_owner.items() if size}
        self.peak = Peak(self.bytes, place, operator, by_owner)
