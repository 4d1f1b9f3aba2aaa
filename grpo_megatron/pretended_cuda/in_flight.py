"""Copies to the host that have been queued and not waited for: their memory holds nothing yet.

A GPU fills it at some time before the next wait. Here it is filled at the wait, and holds values
that are not the right ones until then, so whoever reads too early computes with these."""

import threading

import torch

_lock = threading.Lock()
_queued: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Memory of the host, and what it will hold."""


def begin(target: torch.Tensor, values: torch.Tensor) -> None:
    """Queue a copy to `target` of what `values`, of the same shape and dtype, are now."""
    if target.is_floating_point():
        target.fill_(torch.nan)
    else:
        target.copy_(values.bitwise_not())
    with _lock:
        _queued.append((target, values.clone()))


def finish() -> None:
    """Do all copies that are queued: somebody waits, or what comes next in the queue reads them."""
    with _lock:
        queued = list(_queued)
        _queued.clear()
    for target, values in queued:
        target.copy_(values)
