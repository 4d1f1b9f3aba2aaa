"""Senders and receivers without any engine: packing, order, failures."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.transfer import TransferError, WeightReceiver, WeightSender
from grpo_megatron.weights.transfer_plan import (
    ALIGNMENT,
    TensorEntry,
    TransferPlan,
    digest_tensor,
    entry_of,
)

HOST = "127.0.0.1"


def tensors_of(sender: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sender)
    shapes = {"a": (300, 7), "b": (3,), "c": (), "d": (1000, 40), "e": (0, 5), "f": (5, 5, 5)}
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float16,
    ]
    return {
        f"{name}{sender}": torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def plan_of(num_senders: int, bucket_bytes: int = 4096) -> TransferPlan:
    entries = [entry_of(n, t, k) for k in range(num_senders) for n, t in tensors_of(k).items()]
    return TransferPlan(tuple(entries), num_senders, bucket_bytes)


class Exchange:
    """Senders, and receivers on threads; errors are kept by name."""

    def __init__(self, num_senders: int, num_workers: int, timeout_s: float = 20.0):
        self.plan = plan_of(num_senders)
        self.senders = [
            WeightSender(HOST, num_workers, index=k, timeout_s=timeout_s)
            for k in range(num_senders)
        ]
        self.num_workers, self.timeout_s = num_workers, timeout_s
        self.results, self.loaded = {}, [{} for _ in range(num_workers)]
        self.receivers = [None] * num_workers

    def receive(self, worker: int, publish: int) -> dict[str, str]:
        if self.receivers[worker] is None:
            addresses = [(HOST, s.port) for s in self.senders]
            self.receivers[worker] = WeightReceiver(
                addresses,
                rank=1 + worker,
                world_size=1 + self.num_workers,
                timeout_s=self.timeout_s,
            )
        return self.receivers[worker].receive(
            self.plan, self.loaded[worker].update, publish=publish
        )

    def run(self, publish: int = 0, send=None) -> None:
        send = send or (lambda s: s.send(tensors_of(s.index).items(), self.plan, publish=publish))

        def keep(name, function, *arguments):
            try:
                self.results[name] = function(*arguments)
            except BaseException as error:
                self.results[name] = error

        threads = [
            threading.Thread(target=keep, args=(f"sender {s.index}", send, s)) for s in self.senders
        ]
        threads += [
            threading.Thread(target=keep, args=(f"worker {w}", self.receive, w, publish))
            for w in range(self.num_workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive(), "hung"


@pytest.mark.parametrize(("num_senders", "num_workers"), [(1, 1), (2, 3), (3, 1)])
def test_everything_arrives(num_senders, num_workers):
    exchange = Exchange(num_senders, num_workers)
    for publish in (1, 2):
        exchange.run(publish)
        sent = {}
        for k in range(num_senders):
            sent |= exchange.results[f"sender {k}"]
            for name, tensor in tensors_of(k).items():
                assert sent[name] == digest_tensor(tensor)
                for loaded in exchange.loaded:
                    assert torch.equal(loaded[name], tensor)
                    assert loaded[name].dtype == tensor.dtype
        for w in range(num_workers):
            assert exchange.results[f"worker {w}"] == sent


def test_senders_listen_on_their_host_only():
    sender = WeightSender(HOST, 1)
    local = f"0100007F:{sender.port:04X}"
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        lines = [line.split()[1] for line in [*four, *six] if f":{sender.port:04X} " in line]
    assert local in lines
    assert not [address for address in lines if set(address.split(":")[0]) == {"0"}]


def test_the_wrong_tensor_is_named_and_workers_are_told():
    exchange = Exchange(1, 1)
    wrong = tensors_of(0) | {"d0": torch.zeros(1000, 41, dtype=torch.bfloat16)}
    exchange.run(send=lambda s: s.send(wrong.items(), exchange.plan))
    assert isinstance(exchange.results["sender 0"], MismatchError)
    assert "'d0' torch.bfloat16 (1000, 41)" in str(exchange.results["sender 0"])
    assert isinstance(exchange.results["worker 0"], TransferError)
    assert "weight sender 0" in str(exchange.results["worker 0"])
    assert "gave up" in str(exchange.results["worker 0"])


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_missing_and_extra_tensors(change):
    exchange = Exchange(1, 1)
    tensors = tensors_of(0)
    if change == "missing":
        tensors.popitem()
    else:
        tensors["new"] = torch.zeros(1)
    exchange.run(send=lambda s: s.send(tensors.items(), exchange.plan))
    assert isinstance(exchange.results["sender 0"], MismatchError)
    assert ("f0" if change == "missing" else "new") in str(exchange.results["sender 0"])


def test_a_source_that_raises_ends_both_sides_and_the_groups_stay_usable():
    exchange = Exchange(1, 1)

    def broken():
        yield from list(tensors_of(0).items())[:4]
        raise OSError("disk")

    exchange.run(publish=1, send=lambda s: s.send(broken(), exchange.plan, publish=1))
    assert isinstance(exchange.results["sender 0"], OSError)
    assert "gave up publish 1" in str(exchange.results["worker 0"])
    exchange.run(publish=2)
    assert exchange.results["worker 0"] == exchange.results["sender 0"]


def test_another_publish_number_is_refused():
    exchange = Exchange(1, 1, timeout_s=3.0)
    exchange.run(publish=5, send=lambda s: s.send(tensors_of(0).items(), exchange.plan, publish=4))
    assert "[4, 0," in str(exchange.results["worker 0"])


def test_a_silent_sender_ends_in_a_timeout_that_names_it():
    exchange = Exchange(2, 1, timeout_s=3.0)

    def send(sender):
        sender.join()
        if sender.index == 0:
            return sender.send(tensors_of(0).items(), exchange.plan)
        return None  # sender 1 hangs

    exchange.run(send=send)
    assert isinstance(exchange.results["worker 0"], TransferError)
    assert "weight sender 1" in str(exchange.results["worker 0"])


def test_workers_that_never_join():
    with pytest.raises(TransferError, match="sender 0 waiting for 2 workers"):
        WeightSender(HOST, 2, timeout_s=2.0).join()


def _send_forever(pipe):
    sender = WeightSender(HOST, 1, timeout_s=3600)
    pipe.send(sender.port)

    def tensors():
        for i, item in enumerate(tensors_of(0).items()):
            if i == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    sender.send(tensors(), plan_of(1))


def test_a_killed_sender_is_named():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_send_forever, args=(theirs,))
    process.start()
    port = ours.recv()
    with pytest.raises(TransferError, match=f"weight sender 0 \\(127.0.0.1:{port}\\)"):
        WeightReceiver([(HOST, port)], rank=1, world_size=2, timeout_s=3600).receive(
            plan_of(1), lambda views: None
        )
    process.join(10)


def _join_and_die(port: int) -> None:
    WeightReceiver([(HOST, port)], rank=1, world_size=2, timeout_s=300.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_died_ends_the_publish_with_an_error():
    """And not with the digests of tensors that nobody has."""
    sender = WeightSender(HOST, 1, timeout_s=300.0)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_join_and_die, args=(sender.port,))
    process.start()
    sender.join()
    process.join(300)
    with pytest.raises(TransferError, match="sender 0 sending"):
        sender.send(tensors_of(0).items(), plan_of(1))


def _receive_one_bucket_and_die(port: int) -> None:
    receiver = WeightReceiver([(HOST, port)], rank=1, world_size=3, timeout_s=3600)
    receiver.receive(plan_of(1), lambda views: os.kill(os.getpid(), signal.SIGKILL))


def _receive_until_told(port: int) -> None:
    receiver = WeightReceiver([(HOST, port)], rank=2, world_size=3, timeout_s=3600)
    with pytest.raises(TransferError, match="engine worker receiving"):
        receiver.receive(plan_of(1), lambda views: None)


def test_workers_that_live_are_told_at_once_of_one_that_died():
    """Not when the sender happens to collect garbage, nor when their time is up, an hour later."""
    sender = WeightSender(HOST, 2, timeout_s=300.0)
    spawn = multiprocessing.get_context("spawn")
    targets = (_receive_one_bucket_and_die, _receive_until_told)
    processes = [spawn.Process(target=target, args=(sender.port,)) for target in targets]
    for process in processes:
        process.start()
    sender.join()

    def slowly():
        for name, tensor in tensors_of(0).items():
            time.sleep(0.5)
            yield name, tensor

    gc.disable()
    try:
        with pytest.raises(TransferError, match="sender 0 sending") as raised:
            sender.send(slowly(), plan_of(1))
        del raised
        processes[1].join(300)
    finally:
        gc.enable()
        processes[1].kill()
    assert processes[1].exitcode == 0


def test_weights_that_are_trained_are_sent_as_they_are():
    exchange = Exchange(1, 1)
    trained = {name: tensor.requires_grad_() for name, tensor in tensors_of(0).items()}
    exchange.run(send=lambda s: s.send(trained.items(), exchange.plan))
    assert exchange.results["worker 0"] == exchange.results["sender 0"]
    assert not any(tensor.requires_grad for tensor in exchange.loaded[0].values())


shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=30)


@given(shapes=shapes, limit=st.integers(1, 5000), senders=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_buckets_hold_every_tensor_once_in_order(shapes, limit, senders):
    dtypes = ["float32", "bfloat16", "uint8"]
    entries = tuple(
        TensorEntry(f"t{i}", dtypes[i % 3], shape, i % senders) for i, shape in enumerate(shapes)
    )
    plan = TransferPlan(entries, senders, limit)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=TransferPlan) == plan
    for sender in range(senders):
        buckets = plan.buckets(sender)
        assert [e for b in buckets for e in b.entries] == list(plan.of_sender(sender))
        for bucket in buckets:
            assert bucket.num_bytes <= limit or len(bucket.entries) == 1
            end = 0
            for entry, offset in zip(bucket.entries, bucket.offsets, strict=True):
                assert offset % ALIGNMENT == 0 and offset >= end
                end = offset + entry.num_bytes
            assert end == bucket.num_bytes


def test_buckets_are_filled_up_to_their_limit():
    """Of 32 bytes; the second of two tensors begins at a multiple of 16."""
    sizes = {"a": 10, "b": 16, "c": 1, "d": 40, "e": 16, "f": 17, "g": 0}
    entries = tuple(TensorEntry(name, "uint8", (size,)) for name, size in sizes.items())
    buckets = TransferPlan(entries, 1, 32).buckets(0)
    found = [([e.name for e in bucket.entries], list(bucket.offsets)) for bucket in buckets]
    assert found == [
        (["a", "b"], [0, 16]),
        (["c"], [0]),
        (["d"], [0]),
        (["e"], [0]),
        (["f", "g"], [0, 32]),
    ]


def test_plans_that_make_no_sense():
    with pytest.raises(ValueError, match=r"twice.*x"):
        TransferPlan((TensorEntry("x", "float32", (1,)), TensorEntry("x", "float32", (1,))))
    with pytest.raises(ValueError, match=r"no such sender.*x"):
        TransferPlan((TensorEntry("x", "float32", (1,), 1),))
