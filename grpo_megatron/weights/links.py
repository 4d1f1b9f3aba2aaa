"""One message between two members of a weight stream: begun, then waited for.

    kind          between                     the bytes
    nccl          GPUs of different members   by NCCL
    gpu memory    processes of one node       the receiver copies them from the sender's GPU memory
    host memory   everything else             by gloo, from and to the GPU where there is one

Every class here has `wait`, which raises RuntimeError where the other is gone or takes too long."""

import time
from typing import Any

import torch

from grpo_megatron.weights.gpu_memory import HANDLE_BYTES, handle_of, opened

_MESSAGES = 0
"""Tag of messages, and of handles."""
_TAKEN = 1
"""Tag of the byte by which a receiver says that it has copied what a handle stands for."""
_POLL_S = 0.0002


class NcclWork:
    """A transmission between GPUs, for which the host waits, with a limit. NCCL's own `wait` only
    makes the GPU's stream wait, so that a member that has gone would not be noticed."""

    def __init__(self, work: Any, timeout_s: float):
        self._work = work
        self._deadline = time.monotonic() + timeout_s

    def wait(self) -> None:
        """Wait until the bytes have arrived, or left."""
        while not self._work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("nothing came or went within the time limit")
            time.sleep(_POLL_S)
        self._work.wait()


class SentFromGpu:
    """A message that stays in this process's GPU memory until the receiver has copied it."""

    def __init__(self, group: Any, data: torch.Tensor, to: int):
        self._handle = handle_of(data)
        self._data = data
        self._sent = group.send([self._handle], to, _MESSAGES)
        self._taken = torch.zeros(1, dtype=torch.uint8)
        self._answer = group.recv([self._taken], to, _TAKEN)

    def wait(self) -> None:
        """Wait until the receiver has copied it."""
        self._sent.wait()
        self._answer.wait()


class ReceivedFromGpu:
    """A message that is copied out of the sender's GPU memory into `data`, on this one's."""

    def __init__(self, group: Any, data: torch.Tensor, source: int):
        self._group = group
        self._data = data
        self._source = source
        self._handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        self._work = group.recv([self._handle], source, _MESSAGES)

    def wait(self) -> None:
        """Wait for the handle, copy, and tell the sender."""
        self._work.wait()
        there = opened(self._handle)
        if there.shape != self._data.shape:
            raise RuntimeError(
                f"a message of {there.numel()} bytes came where {self._data.numel()} were expected"
            )
        self._data.copy_(there)
        torch.cuda.current_stream().synchronize()  # the sender may write there again after this
        del there
        taken = torch.ones(1, dtype=torch.uint8)
        self._group.send([taken], self._source, _TAKEN).wait()


class SentThroughHost:
    """A message that gloo sends from host memory."""

    def __init__(self, group: Any, data: torch.Tensor, to: int):
        self._on_host = data.cpu()
        self._work = group.send([self._on_host], to, _MESSAGES)

    def wait(self) -> None:
        """Wait until it has left."""
        self._work.wait()


class ReceivedThroughHost:
    """A message that gloo receives in host memory, for `data`."""

    def __init__(self, group: Any, data: torch.Tensor, source: int):
        self._data = data
        self._on_host = data
        if data.device.type != "cpu":
            self._on_host = torch.empty(data.shape, dtype=data.dtype)
        self._work = group.recv([self._on_host], source, _MESSAGES)

    def wait(self) -> None:
        """Wait until it is there."""
        self._work.wait()
        if self._on_host is not self._data:
            self._data.copy_(self._on_host)
