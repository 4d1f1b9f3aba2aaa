"""Publishing, replays and conversions, executed by ranks with a pretended GPU and by plain ones."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import asdict, replace

from grpo_megatron.batching.store import SampleTable, StepDomain
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import PublishConfig
from grpo_megatron.trainer.conversion_worker import ConversionJob, run
from grpo_megatron.trainer.lora.domain_adapters import DomainAdapters
from grpo_megatron.trainer.megatron.process_groups import RankInfo
from grpo_megatron.trainer.model_sender import ModelSender, PublishedModel
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights import gpu_memory
from grpo_megatron.weights.boxes import whole_box
from grpo_megatron.weights.carrier_names import Carrier
from grpo_megatron.weights.carriers import message_device
from grpo_megatron.weights.fp8_model import Fp8Model
from grpo_megatron.weights.publish_plan import OpenedStream
from grpo_megatron.weights.transfer import StreamReceiver
from tests.trainer.trainer_ranks import Setup, _earlier, release
from tests.trainer.worker_group import fresh_store


def publish(
    model: str, layout: dict[str, Any], carrier: Carrier = "gloo", *, in_fp8: bool = False
) -> dict[str, Any]:
    """Send the weights once to two receivers beside rank 0, of which the first passes them on; all
    digests, how the links carry them, and what arrived."""
    setup = Setup(model, layout)
    published: PublishedModel = setup.policy.sharded
    if in_fp8:
        published = Fp8Model(setup.policy.sharded)
    sender = ModelSender(published, PublishConfig(), carrier)
    kept = {tensor.name: [whole_box(tensor.shape)] for tensor in sender.tensors()}
    [opened] = sender.open([kept, kept])
    engines = [Engine(opened, worker) for worker in (0, 1)]
    if dist.get_rank() == 0:
        for engine in engines:
            engine.start()
    links = sender.join()
    found: dict[str, Any] = {
        "links": links,
        "sent": sender.send(3).digests,
        "received": [],
        "tensors": {},
    }
    if dist.get_rank() == 0:
        for engine in engines:
            engine.join()
            found["received"].append(engine.digests)
            found["tensors"] = engine.shapes
    return found


class Engine(threading.Thread):
    """Receives one publish."""

    def __init__(self, opened: OpenedStream, worker: int):
        super().__init__()
        self.digests: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._opened = opened
        self._worker = worker

    def run(self) -> None:
        """Join, and take everything."""
        opened = self._opened
        address = (opened.host, opened.port)
        with _device_of_thread():
            receiver = StreamReceiver(
                0, opened.stream, self._worker, address, opened.host, opened.carrier, 120
            )
            receiver.receive(3, self._keep)
        assert not receiver.changed
        self.digests = receiver.digests

    def _keep(self, tensors: Any) -> None:
        expected = message_device(self._opened.carrier).type
        for entry, parts in tensors:
            for tensor in parts.values():
                assert tensor.device.type == expected
                self.shapes[entry.name] = tuple(tensor.shape)


def _device_of_thread() -> Any:
    """The pretended device, where there is one, is a mode of each thread."""
    if not torch.cuda.is_available():
        return nullcontext()
    from grpo_megatron.pretended_cuda.dispatch import PretendedCuda

    return PretendedCuda()


def replay(model: str, samples: str, objective: dict[str, Any]) -> list[dict[str, Any]]:
    """An update, and the same from the same weights with its recorded decisions."""
    reports = []
    for replayed in (False, True):
        setup = Setup(model, {})
        config = setup.config(**objective)
        table = SampleTable(Path(samples))
        training = Training(config, setup.policy, References(config), table, {}, replayed=replayed)
        reports.append(asdict(training.run(0, 3)))
    return reports


def train_domains(model: str, steps: list[str]) -> dict[str, np.ndarray]:
    """Train two domains in turn, each its own adapters; what a publish would send of both."""
    lora = LoraConfig(rank=2, targets=("self_attn", "experts"))
    setup = Setup(model, {}, lora=lora)
    config = setup.config(preset="grpo")
    adapters = DomainAdapters(setup.policy, [domain.name for domain in config.domains])
    for step in steps:
        for number, name in enumerate(adapters.domains):
            adapters.take(name)
            table = SampleTable(Path(step), verify=False, domain=StepDomain(number, name))
            Training(config, setup.policy, References(config), table, {}).run(0, 9)
    adapters.refresh()
    published = adapters.published()
    found = {}
    for name, tensor in published.stream(published.entries, [0] * len(published.entries)):
        found[name] = tensor.float().cpu().numpy().copy()
    return found


def convert(job: dict[str, Any]) -> None:
    """One conversion, read back and compared as the command does."""
    while _earlier:
        release(_earlier.pop())
    run(msgspec.convert(job, ConversionJob), RankInfo.from_environment(), fresh_store())


def readable_members() -> dict[str, bool]:
    """Whether this process finds another's numbers in memory that it reads by a handle."""
    sample = gpu_memory._sample(4)
    member = gpu_memory._described(sample)
    own = gpu_memory._described(None)
    gone = gpu_memory._described(gpu_memory._sample(4))  # the numbers themselves are freed
    cases = {
        "as it is": (member, 4),
        "other numbers": (member, 5),
        "another node": (replace(member, node="elsewhere"), 4),
        "a GPU that is not seen": (replace(member, gpu="GPU-7"), 4),
        "no handle": (replace(member, sample=b""), 4),
        "garbage": (replace(member, sample=bytes(gpu_memory.HANDLE_BYTES)), 4),
        "memory that is gone": (gone, 4),
    }
    return {name: gpu_memory._can_read(own, *case) for name, case in cases.items()}
