"""Long-lived process groups for tests: processes start slowly, so one group runs many cases.

A case is a function `module:name` that every rank calls with the same keyword arguments; rank 0's
return value comes back. It is named and not imported: pytest's own process stays without Megatron.
Ranks are forked from one process that has imported torch and Megatron, which takes seconds.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import select
import socket
import struct
import time
import traceback
import warnings
from typing import Any
from unittest.mock import patch

from grpo_megatron import pretended_cuda

CASE_TIMEOUT_S = 1200.0
"""Of one case, on a machine that is busy with other work: the first one waits for imports too."""


class CaseError(AssertionError):
    """A case raised on some rank."""


_RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tests.trainer.preload"])
_SPAWNING = multiprocessing.get_context("spawn")


class WorkerGroup:
    """`world_size` processes on gloo. They are started anew after a case that failed.

    isolated: every rank imports for itself, where a case needs Megatron-Core as released or
    measures its memory. pretended: every rank has a GPU that only pretends."""

    def __init__(self, world_size: int, *, isolated: bool = False, pretended: bool = False):
        self.world_size = world_size
        self._context = _SPAWNING if isolated or pretended else _FORKING
        self._environment = pretended_cuda.environment() if pretended else {}
        self._is_broken = False
        self._start()
        atexit.register(self.close)  # before multiprocessing waits for its children

    def _start(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            store_port = probe.getsockname()[1]
        self._processes = []
        self._links = []
        with patch.dict(os.environ, {**_RANK_ENVIRONMENT, **self._environment}):
            for rank in range(self.world_size):
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store_port),
                }
                port = listener.getsockname()[1]
                # no daemon: those may not have children, and checkpoints are saved by some
                process = self._context.Process(target=_worker, args=(port, environment))
                process.start()
                self._processes.append(process)
        by_rank = {}
        listener.settimeout(CASE_TIMEOUT_S)
        for _ in range(self.world_size):
            link, _ = listener.accept()
            by_rank[_receive(link)] = link
        self._links = [by_rank[rank] for rank in range(self.world_size)]
        listener.close()
        self._is_broken = False

    def run(self, case: str, **arguments: Any) -> Any:
        """Call `module:name` on all ranks; rank 0's answer."""
        if self._is_broken:
            self.close()
            self._start()
        for link in self._links:
            _send(link, (case, arguments))
        try:
            return self._answers(case)
        except CaseError:
            self._is_broken = True  # ranks may be left inside a collective
            for process in self._processes:
                process.kill()
            raise

    def _answers(self, case: str) -> Any:
        """Rank 0's answer; the first failure ends the wait, since it makes other ranks hang."""
        waiting, answers = dict(enumerate(self._links)), {}
        deadline = time.monotonic() + CASE_TIMEOUT_S
        while waiting:
            ready, _, _ = select.select(
                list(waiting.values()), [], [], max(deadline - time.monotonic(), 0)
            )
            if not ready:
                raise CaseError(f"{case}: ranks {sorted(waiting)} did not finish")
            for rank in [r for r, link in waiting.items() if link in ready]:
                ok, answers[rank] = _receive(waiting.pop(rank))
                if not ok:
                    raise CaseError(f"rank {rank}:\n{answers[rank]}")
        return answers[0]

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


_stores: list[Any] = []


def fresh_store() -> Any:
    """In a worker: an empty rendezvous, so that every case can make its groups anew."""
    from torch.distributed import PrefixStore, TCPStore

    if not _stores:
        env = os.environ
        _stores.append(
            TCPStore(
                env["MASTER_ADDR"],
                int(env["MASTER_PORT"]),
                is_master=env["RANK"] == "0",
                wait_for_workers=False,
            )
        )
    _stores.append(PrefixStore(f"case{len(_stores)}", _stores[0]))
    return _stores[-1]


def _send(link: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    link.sendall(struct.pack("<Q", len(data)) + data)


def _receive(link: socket.socket) -> Any:
    (size,) = struct.unpack("<Q", _exactly(link, 8))
    return pickle.loads(_exactly(link, size))


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        block = link.recv(min(size - len(data), 1 << 20))
        if not block:
            raise EOFError("the other side of the worker group has gone")
        data += block
    return data


def _worker(port: int, environment: dict[str, str]) -> None:
    """One rank, until the group is closed."""
    os.environ |= environment
    warnings.simplefilter("ignore")
    link = socket.create_connection(("127.0.0.1", port))
    _send(link, int(environment["RANK"]))
    while True:
        try:
            case, arguments = _receive(link)
        except EOFError:
            os._exit(0)  # torch's threads may abort an orderly exit
        module, name = case.split(":")
        try:
            answer = (True, getattr(importlib.import_module(module), name)(**arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        _send(link, answer)
