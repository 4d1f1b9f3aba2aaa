"""Senders and receivers of streams without any engine: order, passing on, failures."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import HEADER_BYTES, HeldBox, Stream, plan_streams
from grpo_megatron.weights.tensor_entry import entry_of
from grpo_megatron.weights.transfer import StreamReceiver, StreamSender, TransferError, Transmission

HOST = "127.0.0.1"
SHAPES = {"a": (300, 8), "b": (4,), "c": (), "d": (1000, 40), "f": (6, 5, 5)}
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for (name, shape), dtype in zip(SHAPES.items(), DTYPES, strict=True):
        made[name] = torch.randn(shape, generator=generator).to(dtype)
    return made


def parts(tensor: torch.Tensor, dim: int, count: int) -> list[Box]:
    """One or two parts along a dimension; twice the whole where there is none."""
    shape = list(tensor.shape)
    if count == 1 or dim >= len(shape):
        return [whole_box(shape)] * count
    shape[dim] //= 2
    second = [0] * len(shape)
    second[dim] = shape[dim]
    return [Box((0,) * len(shape), tuple(shape)), Box(tuple(second), tuple(shape))]


def streams_of(num_senders: int, num_replicas: int, num_workers: int = 1) -> list[Stream]:
    """One or two senders that hold rows, to replicas of one or two workers that keep columns."""
    held: list[list[HeldBox]] = [[] for _ in range(num_senders)]
    kept: list[dict[str, list[Box]]] = [{} for _ in range(num_workers)]
    for name, tensor in tensors().items():
        for rank, box in enumerate(parts(tensor, 0, num_senders)):
            held[rank].append(HeldBox(entry_of(name, tensor), box))
        for worker, box in enumerate(parts(tensor, 1, num_workers)):
            kept[worker][name] = [box]
    return plan_streams(held, kept * num_replicas, 4096)


def piece_of(name: str, box: Box) -> torch.Tensor:
    tensor = tensors()[name]
    return box.view_in(whole_box(tensor.shape), tensor)


class Exchange:
    """Senders and receivers of one stream on threads; errors are kept by name."""

    def __init__(self, stream: Stream, timeout_s: float = 300.0, delta: bool = False):
        self.stream = stream
        self.timeout_s = timeout_s
        self.delta = delta
        self.senders = {
            k: StreamSender(7, stream, k, HOST, timeout_s=timeout_s, delta=delta)
            for k in stream.senders
        }
        self.address = self.senders[stream.senders[0]].listen()
        self.receivers: dict[int, StreamReceiver] = {}
        self.loaded: dict[int, dict] = {worker: {} for worker in stream.workers}
        self.results: dict[str, object] = {}
        self.is_joined = False

    def send(self, index: int, publish: int, piece=piece_of) -> dict[str, str]:
        sender = self.senders[index]
        if not self.is_joined:
            sender.join(self.address)
        for bucket in range(len(self.stream.buckets())):
            sender.send(publish, bucket, piece)
        sender.finish()
        return sender.digests

    def receive(self, worker: int, publish: int) -> dict[str, str]:
        if worker not in self.receivers:
            self.receivers[worker] = StreamReceiver(
                7,
                self.stream,
                worker,
                self.address,
                HOST,
                timeout_s=self.timeout_s,
                delta=self.delta,
            )

        def load(found):
            for entry, parts in found:
                self.loaded[worker][entry.name] = parts

        receiver = self.receivers[worker]
        receiver.receive(publish, load)
        assert not receiver.changed
        return receiver.digests

    def run(self, publish: int = 0, send=None) -> None:
        send = send or (lambda index: self.send(index, publish))

        def keep(name, function, *arguments):
            try:
                self.results[name] = function(*arguments)
            except BaseException as error:
                self.results[name] = error

        threads = []
        for index in self.senders:
            threads.append(threading.Thread(target=keep, args=(f"sender {index}", send, index)))
        for worker in self.stream.workers:
            arguments = (f"worker {worker}", self.receive, worker, publish)
            threads.append(threading.Thread(target=keep, args=arguments))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "hung"
        self.is_joined = True


@pytest.mark.parametrize(
    ("num_senders", "num_replicas", "num_workers"), [(1, 1, 1), (2, 3, 1), (2, 2, 2)]
)
def test_everything_arrives(num_senders, num_replicas, num_workers):
    for stream in streams_of(num_senders, num_replicas, num_workers):
        assert len(stream.workers) == num_replicas and len(stream.buckets()) > 3
        exchange = Exchange(stream)
        for publish in (1, 2):
            exchange.run(publish)
            sent = {}
            for index in exchange.senders:
                sent |= exchange.results[f"sender {index}"]
            assert len(sent) >= len(stream.buckets())
            for worker, loaded in exchange.loaded.items():
                assert exchange.results[f"worker {worker}"] == sent
                for part in stream.parts:
                    found = loaded[part.tensor.name][part.box]
                    assert torch.equal(found, piece_of(part.tensor.name, part.box))


def moved(version: int, name: str, box: Box) -> torch.Tensor:
    """Weights of a version: "d" moves at 20 places, "a" as a whole in version 3, others never."""
    tensor = tensors()[name]
    if name == "d":
        places = torch.arange(20) * 97 + version
        tensor.view(-1)[places] += 1 + version
    if name == "a" and version == 3:
        tensor = -tensor
    return box.view_in(whole_box(tensor.shape), tensor)


def send_version(exchange: Exchange, version: int, index: int) -> dict[str, str]:
    return exchange.send(index, version, functools.partial(moved, version))


@pytest.mark.parametrize(
    ("num_senders", "num_replicas", "num_workers"), [(1, 1, 1), (2, 3, 1), (2, 2, 2)]
)
def test_changes_alone_give_the_same_weights(num_senders, num_replicas, num_workers):
    for stream in streams_of(num_senders, num_replicas, num_workers):
        exchange = Exchange(stream, delta=True)
        fractions = []
        for version in (1, 2, 3, 4):
            exchange.run(version, functools.partial(send_version, exchange, version))
            sent = {}
            for index in exchange.senders:
                sent |= exchange.results[f"sender {index}"]
            for worker, loaded in exchange.loaded.items():
                assert exchange.results[f"worker {worker}"] == sent
                for part in stream.parts:
                    expected = moved(version, part.tensor.name, part.box)
                    assert torch.equal(loaded[part.tensor.name][part.box], expected)
            senders = exchange.senders.values()
            num_sent = sum(sender.num_sent_bytes for sender in senders)
            fractions.append(num_sent / sum(sender.num_bytes for sender in senders))
        first, second, third, fourth = fractions
        assert first > 1 and second < 0.05
        assert second < third < 1 and second < fourth < 1


def test_a_piece_that_fails_is_told_before_changes_too():
    exchange = Exchange(one_stream(num_replicas=2), delta=True)
    exchange.run(1)

    def broken(name: str, box: Box) -> torch.Tensor:
        if name == "d":
            raise OSError("disk")
        return piece_of(name, box)

    exchange.run(publish=2, send=lambda index: exchange.send(index, 2, broken))
    for worker in (0, 1):
        assert "gave up publish 2" in str(exchange.results[f"worker {worker}"])


def test_a_changed_byte_in_changes_is_found():
    exchange = Exchange(one_stream(num_replicas=2), delta=True)
    exchange.run(1)
    first = exchange.receivers[0]
    send = first._group.send

    def corrupt(data, to):
        if 100 < data.numel() < 400:  # the places and words of "d"
            data = data.clone()
            data[-1] ^= 4
        return send(data, to)

    first._group.send = corrupt
    exchange.run(2, functools.partial(send_version, exchange, 2))
    assert exchange.results["worker 0"] == exchange.results["sender 0"]
    assert isinstance(exchange.results["worker 1"], Exception)


def one_stream(num_senders: int = 1, num_replicas: int = 1) -> Stream:
    [stream] = streams_of(num_senders, num_replicas)
    return stream


def test_senders_listen_on_their_host_only():
    stream = one_stream()
    sender = StreamSender(0, stream, 0, HOST)
    _, port = sender.listen()
    local = f"0100007F:{port:04X}"
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        lines = [line.split()[1] for line in [*four, *six] if f":{port:04X} " in line]
    assert local in lines
    assert not [address for address in lines if set(address.split(":")[0]) == {"0"}]


def without_last_column(piece: torch.Tensor) -> torch.Tensor:
    return piece[:, :-1]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (without_last_column, "'d' torch.bfloat16 (1000, 39)"),
        (lambda piece: piece.float(), "'d' torch.float32 (1000, 40)"),
    ],
    ids=["shape", "dtype"],
)
def test_a_wrong_piece_is_named_and_all_workers_are_told(changed, told):
    exchange = Exchange(one_stream(num_replicas=2))

    def wrong(name: str, box: Box) -> torch.Tensor:
        piece = piece_of(name, box)
        return changed(piece) if name == "d" else piece

    exchange.run(send=lambda index: exchange.send(index, 0, wrong))
    assert isinstance(exchange.results["sender 0"], MismatchError)
    assert told in str(exchange.results["sender 0"])
    for worker in (0, 1):
        assert isinstance(exchange.results[f"worker {worker}"], TransferError)
        assert "trainer rank 0 failed and gave up" in str(exchange.results[f"worker {worker}"])


def test_the_reason_is_told_also_where_the_connection_is_closed_before_anybody_looked(monkeypatch):
    """As gloo reports it when the one before leaves between a message's arrival and the wait."""
    wait = Transmission.wait

    def wait_too_long(self) -> torch.Tensor:
        data = wait(self)
        header = data[:HEADER_BYTES].view(torch.int64)
        if "receiving" in self._what and header[-1] != 0:
            raise TransferError("Connection closed by peer")
        return data

    monkeypatch.setattr(Transmission, "wait", wait_too_long)
    test_a_wrong_piece_is_named_and_all_workers_are_told(without_last_column, "(1000, 39)")


def test_a_source_that_raises_ends_both_sides():
    exchange = Exchange(one_stream())

    def broken(name: str, box: Box) -> torch.Tensor:
        if name == "d":
            raise OSError("disk")
        return piece_of(name, box)

    exchange.run(publish=1, send=lambda index: exchange.send(index, 1, broken))
    assert isinstance(exchange.results["sender 0"], OSError)
    assert "gave up publish 1" in str(exchange.results["worker 0"])


def test_an_engine_that_cannot_load_ends_the_publish_for_those_behind_it():
    exchange = Exchange(one_stream(num_replicas=3), timeout_s=3600)

    def receive(worker: int, publish: int) -> dict[str, str]:
        receiver = StreamReceiver(
            7, exchange.stream, worker, exchange.address, HOST, timeout_s=3600
        )
        receiver.receive(publish, refuse if worker == 1 else lambda found: None)
        return receiver.digests

    def refuse(_):
        raise MismatchError("an engine's loader wants something else")

    exchange.receive = receive
    exchange.run()
    assert isinstance(exchange.results["worker 1"], MismatchError)
    assert isinstance(exchange.results["worker 2"], TransferError)
    assert "from engine worker 1" in str(exchange.results["worker 2"])


def test_another_publish_number_is_refused():
    exchange = Exchange(one_stream(), timeout_s=3.0)
    exchange.run(publish=5, send=lambda index: exchange.send(index, 4))
    assert "[4, 0," in str(exchange.results["worker 0"])


def test_a_changed_byte_is_found_by_the_workers_that_got_it():
    """On the way from the first worker to the second: the first has the right numbers."""
    stream = one_stream(num_replicas=3)
    exchange = Exchange(stream)
    exchange.run(publish=1)
    first = exchange.receivers[0]
    send = first._group.send
    big = max(message.num_bytes for bucket in stream.buckets() for message in bucket.messages)

    def corrupt(data, to):
        if data.numel() == big:
            data = data.clone()
            data[100] ^= 4
        return send(data, to)

    first._group.send = corrupt
    exchange.run(publish=2)
    assert exchange.results["worker 0"] == exchange.results["sender 0"]
    for worker in (1, 2):
        assert isinstance(exchange.results[f"worker {worker}"], AssertionError)
        assert exchange.receivers[worker].changed == ["d"]
        # the digests that travel are as they were sent: the controller learns of it from `changed`
        assert exchange.receivers[worker].digests == exchange.results["sender 0"]


def test_a_silent_sender_ends_in_a_timeout_that_names_it():
    exchange = Exchange(one_stream(num_senders=2), timeout_s=3.0)

    def send(index):
        if index == 0:
            return exchange.send(index, 0)
        exchange.senders[index].join(exchange.address)
        return None  # hangs

    exchange.run(send=send)
    assert isinstance(exchange.results["worker 0"], TransferError)
    assert "from trainer rank 1" in str(exchange.results["worker 0"])


def test_workers_that_never_join():
    sender = StreamSender(0, one_stream(num_replicas=2), 0, HOST, timeout_s=2.0)
    address = sender.listen()
    with pytest.raises(TransferError, match="waiting for 1 trainer ranks and 2 workers"):
        sender.join(address)


def _send_until_killed(pipe, all_joined):
    sender = StreamSender(0, one_stream(), 0, HOST, timeout_s=3600)
    address = sender.listen()
    pipe.send(address)
    sender.join(address)
    all_joined.wait()  # a member that dies before others have joined is named otherwise

    def piece(name: str, box: Box) -> torch.Tensor:
        if name == "d":
            os.kill(os.getpid(), signal.SIGKILL)
        return piece_of(name, box)

    for bucket in range(len(one_stream().buckets())):
        sender.send(0, bucket, piece)


def test_a_killed_sender_is_named():
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    all_joined = spawn.Barrier(2)
    process = spawn.Process(target=_send_until_killed, args=(theirs, all_joined))
    process.start()
    address = ours.recv()
    receiver = StreamReceiver(0, one_stream(), 0, address, HOST, timeout_s=3600)
    all_joined.wait()
    with pytest.raises(TransferError, match="from trainer rank 0"):
        receiver.receive(0, lambda found: None)
    process.join(10)


def _join_and_die(address, all_joined) -> None:
    receiver = StreamReceiver(0, one_stream(), 0, address, HOST, timeout_s=3600)
    all_joined.wait()
    assert receiver  # kept so far: its end closes connections that the sender may still wait for
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_died_ends_the_publish_with_an_error():
    """And not with the digests of tensors that nobody has."""
    sender = StreamSender(0, one_stream(), 0, HOST, timeout_s=3600)
    address = sender.listen()
    spawn = multiprocessing.get_context("spawn")
    all_joined = spawn.Barrier(2)
    process = spawn.Process(target=_join_and_die, args=(address, all_joined))
    process.start()
    sender.join(address)
    all_joined.wait()
    process.join(300)
    with pytest.raises(TransferError, match="sending weights to engine worker 0"):
        _send_all(sender, one_stream())


def _send_all(sender: StreamSender, stream: Stream, pause_s: float = 0.0) -> None:
    for bucket in range(len(stream.buckets())):
        time.sleep(pause_s)
        sender.send(0, bucket, piece_of)
    sender.finish()


def _receive_one_bucket_and_die(address, all_joined) -> None:
    receiver = StreamReceiver(0, one_stream(num_replicas=3), 1, address, HOST, timeout_s=3600)
    all_joined.wait()
    receiver.receive(0, lambda found: os.kill(os.getpid(), signal.SIGKILL))


def _receive_until_told(address, all_joined, worker: int) -> None:
    receiver = StreamReceiver(0, one_stream(num_replicas=3), worker, address, HOST, timeout_s=3600)
    all_joined.wait()
    with pytest.raises(TransferError, match="engine worker 1"):
        receiver.receive(0, lambda found: None)


def test_all_that_live_are_told_at_once_of_a_worker_that_died_in_the_middle():
    """Not when somebody happens to collect garbage, nor when their time is up, an hour later."""
    stream = one_stream(num_replicas=3)
    sender = StreamSender(0, stream, 0, HOST, timeout_s=3600)
    address = sender.listen()
    spawn = multiprocessing.get_context("spawn")
    all_joined = spawn.Barrier(4)
    before = spawn.Process(target=_receive_until_told, args=(address, all_joined, 0))
    dying = spawn.Process(target=_receive_one_bucket_and_die, args=(address, all_joined))
    behind = spawn.Process(target=_receive_until_told, args=(address, all_joined, 2))
    processes = (before, dying, behind)
    for process in processes:
        process.start()
    sender.join(address)
    all_joined.wait()
    gc.disable()
    try:
        with pytest.raises(TransferError, match="sending weights to engine worker 0") as raised:
            _send_all(sender, stream, pause_s=0.5)
        sender.close()
        del raised
        for process in processes:
            process.join(300)
    finally:
        gc.enable()
        for process in processes:
            process.kill()
    assert before.exitcode == behind.exitcode == 0


def test_weights_that_are_trained_are_sent_as_they_are():
    exchange = Exchange(one_stream())

    def trained(name: str, box: Box) -> torch.Tensor:
        return piece_of(name, box).requires_grad_()

    exchange.run(send=lambda index: exchange.send(index, 0, trained))
    assert exchange.results["worker 0"] == exchange.results["sender 0"]
    for parts in exchange.loaded[0].values():
        assert not any(tensor.requires_grad for tensor in parts.values())
