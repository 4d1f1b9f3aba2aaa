"""Which memory of the host is pinned: a GPU copies from and to it while the host goes on.

Nothing is pinned here. Storages are remembered for as long as they live."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_storages: dict[int, StorageWeakRef] = {}
"""By address."""


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Say that the memory of a host tensor, and of all its views, is pinned. Returns it."""
    storage = tensor.untyped_storage()
    for address, known in list(_storages.items()):
        if known.expired():
            del _storages[address]
    _storages[storage.data_ptr()] = StorageWeakRef(storage)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Say whether a host tensor is in memory that was marked."""
    known = _storages.get(tensor.untyped_storage().data_ptr())
    return known is not None and not known.expired()
