"""The wire protocol of weight publishing: trainer senders to the workers of all rollout engines.

    sender 0 (trainer rank) ─┐                      ┌─ worker 0 of replica 0   (rank 1)
    sender 1                 ├─ one gloo group each ┼─ worker 1 of replica 0   (rank 2)
    ...                     ─┘   rank 0 = sender    └─ worker 0 of replica 1   (rank 3) ...

Sender k streams the buckets of its own tensors, each after a header (publish number, bucket index,
size, status), by which a disagreement or a failed sender is noticed. Every worker takes the senders
in the same order: no circle. Waits end after `timeout_s` with an error that names the other."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from grpo_megatron.errors import MismatchError, TransferError
from grpo_megatron.weights.transfer_plan import Bucket, TransferPlan, digest_tensor, entry_of

DEFAULT_TIMEOUT_S = 300.0
_GLOO: Any = ProcessGroupGloo  # torch's stubs leave out its options and collectives
GlooGroup = Any
_BUCKET = 0
"""Status in a header: the bucket follows."""
_ABORT = 1
"""Status in a header: the sender has failed, nothing follows."""


class WeightSender:
    """The trainer's end of one group. `host` is the address at which the workers of all replicas
    reach this process, which listens on no other; `index` says which sender of the plan it is."""

    def __init__(
        self, host: str, num_workers: int, *, index: int = 0, timeout_s: float = DEFAULT_TIMEOUT_S
    ):
        self.host = host
        self.index = index
        self._num_workers = num_workers
        self._timeout = timedelta(seconds=timeout_s)
        self._store = listening_store(host, num_workers, self._timeout)
        self.port: int = self._store.port
        self._group: GlooGroup | None = None

    def join(self) -> None:
        """Wait until all workers have joined; returns at once where they have.

        Raises TransferError after `timeout_s`."""
        if self._group is None:
            with _Naming(f"sender {self.index} waiting for {self._num_workers} workers to join"):
                self._group = _group(
                    self._store, self.host, 0, 1 + self._num_workers, self._timeout
                )

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], plan: TransferPlan, *, publish: int = 0
    ) -> dict[str, str]:
        """Stream this sender's tensors, holding at most two buckets.

        tensors: the plan's entries of this sender, in its order; each may be dropped once the next
        one is asked for. publish: weight version, on which both sides must agree. Returns digests
        from before packing. MismatchError: not the tensor that is next in the plan."""
        self.join()
        assert self._group is not None  # joined
        stream = iter(tensors)
        digests: dict[str, str] = {}
        sending: tuple[Any, torch.Tensor] | None = None  # the work, and what must live until then
        try:
            buckets = plan.buckets(self.index)
            for number, bucket in enumerate(buckets):
                data = self._pack(bucket, stream, digests)
                if number == len(buckets) - 1:  # while the workers can still be told
                    for name, _ in stream:
                        raise MismatchError(f"tensor {name!r} is not in the transfer plan")
                self._finish(sending)
                with _Naming(f"sender {self.index} sending bucket {number} to the engine workers"):
                    header = torch.tensor([publish, number, data.numel(), _BUCKET])
                    self._group.broadcast(header, 0).wait()
                    sending = self._group.broadcast(data, 0), data
            self._finish(sending)
        except TransferError:
            self._group = None  # closed: workers that live wait no longer
            raise
        except BaseException:
            self._abort(publish, sending)
            raise
        return digests

    def _pack(
        self, bucket: Bucket, stream: Iterator[tuple[str, torch.Tensor]], digests: dict[str, str]
    ) -> torch.Tensor:
        """Fill a bucket: uint8 [bucket.num_bytes] on the CPU, zero between tensors."""
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for entry, (_, view) in zip(bucket.entries, bucket.views(data), strict=True):
            given = next(stream, None)
            if given is None:
                raise MismatchError(f"tensor {entry.name!r} of the transfer plan was not given")
            name, tensor = given
            if entry_of(name, tensor, entry.sender) != entry:
                raise MismatchError(
                    f"sender {self.index} was given {name!r} {tensor.dtype} {tuple(tensor.shape)} "
                    f"where the transfer plan has {entry.name!r} {entry.dtype} {entry.shape}"
                )
            tensor = tensor.detach().cpu()
            digests[name] = digest_tensor(tensor)
            view.copy_(tensor)
        return data

    def _finish(self, sending: tuple[Any, torch.Tensor] | None) -> None:
        if sending is not None:
            with _Naming(f"sender {self.index} sending to the engine workers"):
                sending[0].wait()

    def _abort(self, publish: int, sending: tuple[Any, torch.Tensor] | None) -> None:
        """Tell the workers that no more comes, so that they need not wait for the time limit."""
        assert self._group is not None  # it was sending
        with suppress(TransferError, RuntimeError):  # they are gone; the first error is raised
            self._finish(sending)
            self._group.broadcast(torch.tensor([publish, 0, 0, _ABORT]), 0).wait()


class WeightReceiver:
    """An engine worker's end of all groups, as rank 1 or higher.

    `senders` are host and port of each, in the order of the plan. Raises TransferError where one
    cannot be joined within `timeout_s`."""

    def __init__(
        self,
        senders: Sequence[tuple[str, int]],
        *,
        rank: int,
        world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ):
        self._groups: dict[str, GlooGroup] = {}
        timeout = timedelta(seconds=timeout_s)
        for number, (host, port) in enumerate(senders):
            name = f"weight sender {number} ({host}:{port})"
            with _Naming(f"engine worker {rank} joining {name}"):
                store = TCPStore(host, port, None, is_master=False, timeout=timeout)
                self._groups[name] = _group(store, host, rank, world_size, timeout)

    def receive(
        self,
        plan: TransferPlan,
        load: Callable[[list[tuple[str, torch.Tensor]]], object],
        *,
        publish: int = 0,
    ) -> dict[str, str]:
        """Receive a whole publish, handing each bucket's tensors to `load`.

        `load` may keep them: a bucket's storage is never written again. Returns every tensor's
        digest. Raises TransferError when a sender died, gave up, hung or sends another publish."""
        digests: dict[str, str] = {}
        try:
            for sender, name in enumerate(self._groups):
                for number, bucket in enumerate(plan.buckets(sender)):
                    data = self._bucket(name, [publish, number, bucket.num_bytes])
                    views = bucket.views(data)
                    for tensor_name, tensor in views:
                        digests[tensor_name] = digest_tensor(tensor)
                    load(views)
        except TransferError as error:
            if error.__cause__:  # of gloo: closed, so that nobody waits for this worker
                self._groups.clear()
            raise
        return digests

    def _bucket(self, name: str, expected: list[int]) -> torch.Tensor:
        """Receive one bucket, uint8 [bytes]. expected: publish, bucket, bytes."""
        with _Naming(f"engine worker receiving bucket {expected[1]} from {name}"):
            header = torch.zeros(4, dtype=torch.int64)
            self._groups[name].broadcast(header, 0).wait()
            *got, status = header.tolist()
            if status == _ABORT:
                raise TransferError(f"{name} failed and gave up publish {got[0]}")
            if got != expected:
                raise TransferError(
                    f"{name} sends publish, bucket, bytes {got} where this worker "
                    f"expects {expected}"
                )
            data = torch.empty(expected[2], dtype=torch.uint8)
            self._groups[name].broadcast(data, 0).wait()
        return data


def listening_store(host: str, num_clients: int, timeout: timedelta) -> TCPStore:
    """Open a store on a free port of `host` only: TCPStore by itself listens on every interface."""
    listener = socket.create_server((host, 0), backlog=max(128, num_clients))
    return TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _group(store: TCPStore, host: str, rank: int, world_size: int, timeout: timedelta) -> GlooGroup:
    """A gloo group outside torch's global one; blocks until all members have come."""
    options = _GLOO._Options()
    options._timeout = timeout
    # A loopback store means that every member is on this machine: then no other interface listens.
    # Otherwise gloo takes the host's own address, or what GLOO_SOCKET_IFNAME says.
    if ipaddress.ip_address(host).is_loopback:
        options._devices = [_GLOO.create_device(hostname=host)]
    else:
        options._devices = [_GLOO.create_default_device()]
    return _GLOO(PrefixStore("weights", store), rank, world_size, options)


class _Naming:
    """Turn gloo's and the store's errors into one that says what was waited for, and for whom.

    No `contextmanager`: since Python 3.12 such an error and contextlib's frame hold each other, and
    with them frames whose works keep the group open, until garbage is collected."""

    def __init__(self, what: str):
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError):  # none of ours is one
            raise TransferError(
                f"{self._what}: {str(error).splitlines()[0]}",
                remedy="look for the first error in the logs of the trainer and of the engines",
            ) from error
