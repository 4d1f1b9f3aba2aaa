"""Which of the pretended devices this process works on."""

from typing import Any

import torch

NUM_DEVICES = 8
"""As many as a machine has ranks for; each process uses the one of its local rank."""

_index = 0


def current_device() -> torch.device:
    """Return the device of this process."""
    return torch.device("cuda", _index)


def set_current(index: int) -> None:
    """Work on another device. Raises RuntimeError for one that is not there."""
    global _index
    if not 0 <= index < NUM_DEVICES:
        raise RuntimeError(f"invalid device ordinal: {index} of {NUM_DEVICES} pretended devices")
    _index = index


def as_device(device: Any) -> torch.device | None:
    """Return `device` with its index; None for what is no GPU."""
    found = torch.device(device)
    if found.type != "cuda":
        return None
    if found.index is None:
        return current_device()
    return found
