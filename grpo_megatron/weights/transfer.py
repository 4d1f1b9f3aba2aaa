"""The wire protocol of weight publishing: trainer senders to the workers of all rollout engines.

    sender 0 (trainer rank) ─┐                      ┌─ worker 0 of replica 0   (rank 1)
    sender 1                 ├─ one gloo group each ┼─ worker 1 of replica 0   (rank 2)
    ...                     ─┘   rank 0 = sender    └─ worker 0 of replica 1   (rank 3) ...

Sender k streams the buckets of its own tensors, each preceded by a header (publish number, bucket
index, size, status) that makes both sides notice when they are not talking of the same thing, and
lets a sender that failed say so. A worker receives all of sender 0, then all of sender 1, and so
on: every worker takes the groups in the same order, so they cannot wait for each other in a circle;
a later sender simply waits for its turn. Every wait ends after `timeout_s` with an error that names
the other side.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from grpo_megatron.errors import MismatchError, TrainerError
from grpo_megatron.weights.digests import digest_tensor
from grpo_megatron.weights.transfer_plan import Bucket, TransferPlan, entry_of

__all__ = ["TransferError", "TransferPlan", "WeightReceiver", "WeightSender", "make_group"]

DEFAULT_TIMEOUT_S = 300.0
_BUCKET, _ABORT = 0, 1


class TransferError(TrainerError):
    """The other side of a weight transfer died, gave up or hung."""


def make_group(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S,
    store: TCPStore | None = None,
) -> ProcessGroupGloo:
    """A gloo group outside torch's global one; blocks until all `world_size` members have come.

    Args:
        host: Address of the member that owns the store (rank 0, the sender).
        port: Port of the store.
        rank: This member, 0 for the sender.
        world_size: Members, one sender and all workers.
        timeout_s: Limit of the rendezvous and of every later operation.
        store: The sender's own store; workers connect to it.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(host, port, None, is_master=False, timeout=timeout)
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    # A loopback store means that every member is on this machine: then no other interface listens.
    # Otherwise gloo takes the host's own address, or what GLOO_SOCKET_IFNAME says.
    device = (
        ProcessGroupGloo.create_device(hostname=host) if _is_loopback(host)
        else ProcessGroupGloo.create_default_device()
    )
    options._devices = [device]
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, options)


class WeightSender:
    """The trainer's end of one group.

    Args:
        host: Address on which the workers reach this process; only it is listened on.
        num_workers: Engine workers of all replicas together.
        index: Which sender of the plan this is.
        timeout_s: Limit of every wait.
    """

    def __init__(
        self, host: str, num_workers: int, *, index: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.host, self.index = host, index
        self._num_workers, self._timeout_s = num_workers, timeout_s
        # TCPStore would listen on every interface: give it a socket that is already bound.
        listener = socket.create_server((host, 0), backlog=max(128, num_workers))
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host, self.port, None, is_master=True, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )
        self._group: ProcessGroupGloo | None = None

    def join(self) -> None:
        """Wait until all workers have joined (idempotent).

        Raises:
            TransferError: They did not within the time limit.
        """
        if self._group is not None:
            return
        with _naming(f"sender {self.index} waiting for {self._num_workers} workers to join"):
            self._group = make_group(
                self.host, self.port, rank=0, world_size=1 + self._num_workers,
                timeout_s=self._timeout_s, store=self._store,
            )

    def send(
        self, tensors: Iterable[tuple[str, torch.Tensor]], plan: TransferPlan, *, publish: int = 0,
    ) -> dict[str, str]:
        """Stream this sender's tensors, holding at most two buckets.

        Args:
            tensors: Exactly the plan's entries of this sender, in its order; each may be dropped
                by the caller once the next one is asked for.
            plan: The publish.
            publish: Number both sides must agree on, the weight version.

        Returns:
            Digest of every tensor as it was before packing.

        Raises:
            MismatchError: A tensor is not the one that the plan names next.
            TransferError: A worker died or hung.
        """
        self.join()
        stream, digests = iter(tensors), {}
        sending: tuple[object, torch.Tensor] | None = None
        try:
            buckets = plan.buckets(self.index)
            for number, bucket in enumerate(buckets):
                data = self._pack(bucket, self._take(stream, bucket, digests))
                if number == len(buckets) - 1:  # while the workers can still be told
                    _require_end(stream)
                sending = self._broadcast(publish, number, data, sending)
            self._finish(sending)
        except TransferError:
            raise
        except BaseException:
            self._abort(publish, sending)
            raise
        return digests

    def _take(
        self, stream: Iterator[tuple[str, torch.Tensor]], bucket: Bucket, digests: dict[str, str],
    ) -> Iterator[torch.Tensor]:
        for entry in bucket.entries:
            item = next(stream, None)
            if item is None:
                raise MismatchError(f"tensor {entry.name!r} of the transfer plan was not given")
            name, tensor = item
            if entry_of(name, tensor, entry.sender) != entry:
                raise MismatchError(
                    f"sender {self.index} was given {name!r} {tensor.dtype} {tuple(tensor.shape)} "
                    f"where the transfer plan has {entry.name!r} {entry.dtype} {entry.shape}"
                )
            digests[name] = digest_tensor(tensor)
            yield tensor

    def _pack(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """`uint8 [bucket.num_bytes]` on the CPU; gaps between tensors are zero."""
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for (_, view), tensor in zip(bucket.views(data), tensors, strict=True):
            view.copy_(tensor.detach())
        return data

    def _broadcast(self, publish: int, number: int, data: torch.Tensor, sending):
        """Wait for the previous bucket, then start this one."""
        self._finish(sending)
        with _naming(f"sender {self.index} sending bucket {number} to the engine workers"):
            header = torch.tensor([publish, number, data.numel(), _BUCKET])
            self._group.broadcast(header, 0).wait()
            return self._group.broadcast(data, 0), data

    def _finish(self, sending) -> None:
        if sending is not None:
            with _naming(f"sender {self.index} sending to the engine workers"):
                sending[0].wait()

    def _abort(self, publish: int, sending) -> None:
        """Tell the workers that no more comes, so that they need not wait for the time limit."""
        try:
            self._finish(sending)
            self._group.broadcast(torch.tensor([publish, 0, 0, _ABORT]), 0).wait()
        except (TransferError, RuntimeError):  # they are gone; the first error is the one to raise
            pass


class WeightReceiver:
    """An engine worker's end of all groups.

    Args:
        senders: `(host, port)` of every sender, in plan order.
        rank: This worker, from 1.
        world_size: One sender and all workers.
        timeout_s: Limit of every wait.
    """

    def __init__(
        self, senders: Sequence[tuple[str, int]], *, rank: int, world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._names = [f"weight sender {k} ({h}:{p})" for k, (h, p) in enumerate(senders)]
        self._groups = []
        for name, (host, port) in zip(self._names, senders, strict=True):
            with _naming(f"engine worker {rank} joining {name}"):
                self._groups.append(
                    make_group(host, port, rank=rank, world_size=world_size, timeout_s=timeout_s)
                )

    def receive(
        self, plan: TransferPlan, load: Callable[[list[tuple[str, torch.Tensor]]], object], *,
        publish: int = 0,
    ) -> dict[str, str]:
        """Receive a whole publish, handing each bucket's tensors to `load`.

        `load` may keep the tensors: a bucket's storage is never written again.

        Returns:
            Digest of every tensor as received.

        Raises:
            TransferError: A sender died, gave up, hung or sends another publish.
        """
        digests: dict[str, str] = {}
        for sender, _name in enumerate(self._names):
            for number, bucket in enumerate(plan.buckets(sender)):
                views = bucket.views(self._bucket(sender, publish, number, bucket.num_bytes))
                digests.update((tensor_name, digest_tensor(t)) for tensor_name, t in views)
                load(views)
        return digests

    def _bucket(self, sender: int, publish: int, number: int, num_bytes: int) -> torch.Tensor:
        group, name = self._groups[sender], self._names[sender]
        with _naming(f"engine worker receiving bucket {number} from {name}"):
            header = torch.zeros(4, dtype=torch.int64)
            group.broadcast(header, 0).wait()
            got = header.tolist()
            if got[3] == _ABORT:
                raise TransferError(f"{name} failed and gave up publish {got[0]}")
            if got[:3] != [publish, number, num_bytes]:
                raise TransferError(
                    f"{name} sends publish, bucket, bytes {got[:3]} where this worker expects "
                    f"{[publish, number, num_bytes]}"
                )
            data = torch.empty(num_bytes, dtype=torch.uint8)
            group.broadcast(data, 0).wait()
        return data


class _naming:
    """Turn gloo's and the store's errors into one that says what was waited for, and for whom."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, _) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, TransferError):
            raise TransferError(
                f"{self._what}: {str(error).splitlines()[0]}",
                remedy="look for the first error in the logs of the trainer and of the engines",
            ) from error


def _require_end(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    extra = next(stream, None)
    if extra is not None:
        raise MismatchError(f"tensor {extra[0]!r} is not in the transfer plan")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
