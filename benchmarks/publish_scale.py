"""How close a publish comes to what its links allow: the real plan and carrier between namespaces.

    sudo python benchmarks/publish_scale.py [--replicas 1 4 8] [--tensor-parallel 2] [--mbit 80]

Every trainer rank and every engine worker is a thread in a network namespace of its own, connected
to one switch by links of limited bandwidth (and with a delay where the kernel has netem). The plan,
the streams and the messages are those of a run; tensors and links are smaller than a cluster's by
about the same factor, and so are the buckets, so that there are as many. Needs root.

Printed for each number of replicas: the bytes that a worker keeps and receives, the seconds of a
publish, and the bound: bytes that must cross the busiest link, divided by its bandwidth.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import HeldBox, Kept, Stream, plan_streams
from grpo_megatron.weights.tensor_entry import TensorEntry
from grpo_megatron.weights.transfer import StreamReceiver, StreamSender

NUM_TENSORS = 160
TENSOR_SHAPE = (256, 256)
DTYPE = "float32"
SWITCH = "publish-switch"


@dataclass(frozen=True)
class Links:
    """What connects a node to the switch, in each direction."""

    mbit: float
    delay_ms: float

    @property
    def bytes_per_s(self) -> float:
        return self.mbit * 1e6 / 8

    @property
    def discipline(self) -> list[str]:
        """What tc is told; a delay needs a kernel with netem."""
        rate = f"{self.mbit}mbit"
        if self.delay_ms:
            return ["netem", "rate", rate, "delay", f"{self.delay_ms}ms", "limit", "20000"]
        return ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--trainer-ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=80.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--publishes", type=int, default=3)
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    torch.set_num_threads(1)
    links = Links(options.mbit, options.delay_ms)
    first = 0.0
    for replicas in options.replicas:
        seconds, bound, stream = measure(options, links, replicas)
        first = first or seconds
        workers = replicas * options.tensor_parallel
        received = sum(m.num_bytes for bucket in stream.buckets() for m in bucket.messages)
        print(
            f"{replicas} replicas, {workers} workers: kept {stream.num_bytes / 1e6:.1f} MB, "
            f"received {received / stream.num_bytes:.4f} times as much, "
            f"{len(stream.buckets())} buckets; {seconds:.2f} s, bound {bound:.2f} s, "
            f"ratio {seconds / bound:.2f}; against the first line {seconds / first:.2f}",
            flush=True,
        )


def measure(
    options: argparse.Namespace, links: Links, replicas: int
) -> tuple[float, float, Stream]:
    """Return the shortest publish of several, its bound, and a stream of it."""
    held = held_by(options.trainer_ranks)
    kept = kept_by(options.tensor_parallel) * replicas
    streams = plan_streams(held, kept, 256 << 20, min_bucket_bytes=1 << 14)
    names = [f"t{rank}" for rank in range(len(held))] + [f"w{n}" for n in range(len(kept))]
    with Nodes(names, links) as nodes:
        seconds = min(publish_times(nodes, streams, options.publishes))
    return seconds, bound_s(streams, len(held), len(kept), links), streams[0]


def held_by(num_ranks: int) -> list[list[HeldBox]]:
    """Rows of every tensor, by trainer rank."""
    rows = TENSOR_SHAPE[0] // num_ranks
    held: list[list[HeldBox]] = []
    for rank in range(num_ranks):
        box = Box((rank * rows, 0), (rows, TENSOR_SHAPE[1]))
        held.append([HeldBox(tensor, box) for tensor in tensors()])
    return held


def kept_by(size: int) -> list[Kept]:
    """Rows or columns of every tensor, by worker of a replica."""
    kept: list[Kept] = [{} for _ in range(size)]
    for number, tensor in enumerate(tensors()):
        dim = number % 2
        for worker in range(size):
            start = [0, 0]
            shape = list(TENSOR_SHAPE)
            shape[dim] //= size
            start[dim] = worker * shape[dim]
            kept[worker][tensor.name] = [Box(tuple(start), tuple(shape))]
    return kept


def tensors() -> list[TensorEntry]:
    return [TensorEntry(f"layers.{n}.weight", DTYPE, TENSOR_SHAPE) for n in range(NUM_TENSORS)]


def bound_s(streams: Sequence[Stream], num_ranks: int, num_workers: int, links: Links) -> float:
    """Seconds that the busiest link needs for what must cross it."""
    out = [0] * num_ranks
    into = [0] * num_workers
    for stream in streams:
        for part in stream.parts:
            for piece in part.pieces:
                out[piece.sender] += piece.box.num_elements * part.tensor.torch_dtype.itemsize
        for worker in stream.workers:
            into[worker] += stream.num_bytes
    return max(*out, *into) / links.bytes_per_s


def publish_times(nodes: Nodes, streams: Sequence[Stream], count: int) -> list[float]:
    """Connect once, then publish `count` times; seconds of each."""
    weight = torch.randn(TENSOR_SHAPE)
    senders: dict[str, list[StreamSender]] = {}
    addresses = []
    for number, stream in enumerate(streams):
        for rank in stream.senders:
            sender = StreamSender(number, stream, rank, nodes.address(f"t{rank}"), timeout_s=60)
            senders.setdefault(f"t{rank}", []).append(sender)
            if rank == stream.senders[0]:
                addresses.append(nodes.run(f"t{rank}", sender.listen).result())
    joining = []
    receivers: dict[str, Any] = {}
    for name, own in senders.items():
        joining.append(nodes.run(name, join_all, own, addresses))
    for number, stream in enumerate(streams):
        for worker in stream.workers:
            name = f"w{worker}"
            receivers[name] = nodes.run(
                name,
                StreamReceiver,
                number,
                stream,
                worker,
                addresses[number],
                nodes.address(name),
                "gloo",
                60,
            )
    for done in joining:
        done.result()
    num_buckets = max(len(stream.buckets()) for stream in streams)
    times = []
    for publish in range(count):
        started = time.perf_counter()
        running = []
        for name, receiver in receivers.items():
            running.append(nodes.run(name, receiver.result().receive, publish, ignore))
        for name, own in senders.items():
            running.append(nodes.run(name, send_all, own, publish, num_buckets, weight))
        for done in running:
            done.result()
        times.append(time.perf_counter() - started)
    for receiver in receivers.values():
        assert not receiver.result().changed
    return times


def join_all(senders: Sequence[StreamSender], addresses: Sequence[tuple[str, int]]) -> None:
    for sender in senders:
        sender.join(addresses[sender.number])


def send_all(
    senders: Sequence[StreamSender], publish: int, num_buckets: int, weight: torch.Tensor
) -> None:
    def piece_of(name: str, box: Box) -> torch.Tensor:
        return box.view_in(whole_box(TENSOR_SHAPE), weight)

    for bucket in range(num_buckets):
        for sender in senders:
            sender.send(publish, bucket, piece_of)
    for sender in senders:
        sender.finish()


def ignore(_: object) -> None:
    """Take the place of an engine that loads."""


class Nodes:
    """Network namespaces on one switch, each with a thread that lives in it."""

    def __init__(self, names: Sequence[str], links: Links):
        self._names = list(names)
        self._links = links
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def address(self, name: str) -> str:
        number = self._names.index(name) + 1
        return f"10.201.{number // 250}.{number % 250 + 1}"

    def __enter__(self) -> Nodes:
        self._remove()
        ip("link", "add", SWITCH, "type", "bridge")
        ip("link", "set", SWITCH, "up")
        for number, name in enumerate(self._names):
            space, outside, inside = f"pub-{name}", f"pub{number}", "eth0"
            ip("netns", "add", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", space)
            ip("link", "set", outside, "master", SWITCH, "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/16", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", space, "link", "set", "lo", "up")
            limit = ["root", *self._links.discipline]
            run("tc", "qdisc", "add", "dev", outside, *limit)
            run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inside, *limit)
            self._threads[name] = ThreadPoolExecutor(1, initializer=enter, initargs=(space,))
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", f"pub-{name}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", SWITCH], capture_output=True, check=False)

    def run(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` in the namespace; a future."""
        return self._threads[name].submit(work, *arguments)


def enter(space: str) -> None:
    """Move this thread, and those that it starts, into a namespace."""
    with open(f"/var/run/netns/{space}") as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)
    threading.current_thread().name = space


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
