"""Trainer ranks of several layouts, and engine workers that keep odd parts, without an engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.trainer.requests import DescribeWeights, JoinTransfer, OpenTransfer, SendWeights
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import OpenedStream
from grpo_megatron.weights.tensor_entry import TensorEntry
from grpo_megatron.weights.transfer import StreamReceiver
from tests.integration.conftest import trainer_config
from tests.trainer.models import DENSE, MOE, write_model

pytestmark = pytest.mark.engine

CASES = "tests.integration.trainer_side:"
LAYOUTS = {
    "tp2": (2, "dense", {"tensor_parallel_size": 2}),
    "dp2": (2, "dense", {}),
    "ep2": (2, "moe", {"expert_parallel_size": 2}),
    "tp2_pp2": (4, "dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp4": (4, "dense", {"tensor_parallel_size": 4}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Large enough for several buckets of the smallest size."""
    root = tmp_path_factory.mktemp("models")
    wide = {"intermediate_size": 4096, "num_key_value_heads": 4}
    experts = {"num_hidden_layers": 2, "moe_intermediate_size": 2048}
    return {
        "dense": write_model(root / "dense", DENSE | wide, 1),
        "moe": write_model(root / "moe", MOE | experts, 2),
    }


def odd_thirds(tensor: TensorEntry) -> list[list[Box]]:
    """Of three workers: the first rows, the other rows in two parts of the columns."""
    if tensor.shape[0] < 3:
        return [[whole_box(tensor.shape)]] * 3
    first = tensor.shape[0] // 3
    rest = tensor.shape[0] - first
    if len(tensor.shape) == 1:
        return [[Box((0,), (first,))], [Box((first,), (rest,))], [Box((first,), (rest,))]]
    middle = tensor.shape[1] // 2
    return [
        [Box((0, 0), (first, tensor.shape[1]))],
        [Box((first, 0), (rest, middle))],
        [Box((first, middle), (rest, tensor.shape[1] - middle))],
    ]


class Worker:
    """An engine worker that only keeps what it receives."""

    def __init__(self, number: int, streams: list[OpenedStream]):
        self.received: dict[tuple[str, Box], torch.Tensor] = {}
        for index, opened in enumerate(streams):
            if number in opened.stream.workers:
                self._arguments = (
                    index,
                    opened.stream,
                    number,
                    (opened.host, opened.port),
                    opened.host,
                    "gloo",
                    300,
                )

    def receive(self) -> StreamReceiver:
        receiver = StreamReceiver(*self._arguments)
        receiver.receive(3, self._keep)
        return receiver

    def _keep(self, tensors) -> None:
        for entry, parts in tensors:
            for box, numbers in parts.items():
                self.received[entry.name, box] = numbers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_arrives_from_all_ranks(request, models, layout):
    num_ranks, kind, parallel = LAYOUTS[layout]
    group = request.getfixturevalue(f"world{num_ranks}")
    config = trainer_config(num_ranks, parallel, {"bucket_mib": 1}, 1.0)
    group.run(CASES + "start", config=config, model=models[kind])
    tensors = group.run(CASES + "execute", request=DescribeWeights())
    expected = load_file(f"{models[kind]}/model.safetensors")
    assert {(t.name, t.shape) for t in tensors} == {
        (n, tuple(t.shape)) for n, t in expected.items()
    }
    kept = [{}, {}, {}]
    for tensor in tensors:
        for worker, boxes in zip(kept, odd_thirds(tensor), strict=True):
            worker[tensor.name] = boxes
    kept.append(kept[0])  # of a second replica
    streams = group.run(CASES + "execute", request=OpenTransfer(kept=kept))
    assert [opened.stream.workers for opened in streams] == [(0, 3), (1,), (2,)]
    assert all(len(opened.stream.buckets()) > 3 for opened in streams)
    senders = {sender for opened in streams for sender in opened.stream.senders}
    assert senders == set(range(num_ranks))
    workers = [Worker(number, streams) for number in range(len(kept))]
    with ThreadPoolExecutor(len(workers)) as pool:
        receiving = [pool.submit(worker.receive) for worker in workers]
        group.run(CASES + "execute", request=JoinTransfer())
        sent = group.run(CASES + "execute", request=SendWeights(version=3))
        receivers = [found.result() for found in receiving]
    for receiver, worker, boxes in zip(receivers, workers, kept, strict=True):
        assert not receiver.changed
        digests = sent.digests.items()
        own = {key: digest for key, digest in digests if key.startswith(f"{receiver.number}/")}
        assert receiver.digests == own
        assert {name for name, _ in worker.received} == boxes.keys()
        for (name, box), numbers in worker.received.items():
            whole = expected[name]
            assert torch.equal(numbers, box.view_in(whole_box(whole.shape), whole)), name
