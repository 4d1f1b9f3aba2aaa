"""Copies between host and GPU that do not make the host wait for the GPU's queue.

`tensor.to("cuda")` and `tensor.cpu()` wait until everything queued before is done. On a CPU these
functions return their arguments, or copies of the same values."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any shape to `device`: from the host by pinned memory, without waiting.

    Convert its dtype before: a conversion on the way would be made in memory that is not pinned."""
    if device.type == "cuda" and values.device.type == "cpu":
        return pinned(values.contiguous()).to(device, non_blocking=True)
    return values.to(device)


def pinned(values: Tensor) -> Tensor:
    """Return host values in pinned memory where there is a GPU to copy to; else as they are."""
    if _has_gpu():
        return values.pin_memory()
    return values


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def on_the_way_to_host(values: Tensor) -> Tensor:
    """Begin to copy `values` to the host. The result may be read after `wait_for_copies`."""
    return values.to("cpu", non_blocking=True)


def wait_for_copies() -> None:
    """Let the host wait for all copies that were begun; nothing without a GPU."""
    if _has_gpu():
        torch.cuda.current_stream().synchronize()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy several tensors to the host and wait once for all; those of the host are not copied."""
    copies = [on_the_way_to_host(values) for values in tensors]
    if any(values.device.type == "cuda" for values in tensors):
        wait_for_copies()
    return copies
