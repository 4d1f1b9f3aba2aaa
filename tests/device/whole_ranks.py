"""Publishing, replays and conversions, executed by ranks with a pretended GPU and by plain ones."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import asdict

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import PublishConfig
from grpo_megatron.trainer.conversion_worker import ConversionJob, run
from grpo_megatron.trainer.megatron.process_groups import RankInfo
from grpo_megatron.trainer.model_sender import ModelSender
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.boxes import whole_box
from grpo_megatron.weights.transfer import StreamReceiver
from tests.trainer.trainer_ranks import Setup, _earlier, release
from tests.trainer.worker_group import fresh_store


def publish(model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Send the weights once to a receiver beside rank 0; both sides' digests, and what arrived."""
    setup = Setup(model, layout)
    carrier = "nccl" if torch.cuda.is_available() else "gloo"
    sender = ModelSender(setup.policy.sharded, PublishConfig(), carrier)
    tensors = sender.tensors()
    [opened] = sender.open([{tensor.name: [whole_box(tensor.shape)] for tensor in tensors}])
    arrived: dict[str, Any] = {}

    def receive() -> None:
        address = (opened.host, opened.port)
        with _device_of_thread():
            receiver = StreamReceiver(0, opened.stream, 0, address, opened.host, carrier, 120)
            receiver.receive(3, keep)
        assert not receiver.changed
        arrived["digests"] = receiver.digests

    def keep(tensors: Any) -> None:
        for entry, parts in tensors:
            for tensor in parts.values():
                assert tensor.device.type == ("cuda" if carrier == "nccl" else "cpu")
                arrived[entry.name] = tuple(tensor.shape)

    engine = threading.Thread(target=receive)
    if dist.get_rank() == 0:
        engine.start()
    sender.join()
    digests = sender.send(3)
    if dist.get_rank() == 0:
        engine.join()
    return {"sent": digests, "received": arrived.pop("digests", {}), "tensors": arrived}


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


def convert(job: dict[str, Any]) -> None:
    """One conversion, read back and compared as the command does."""
    while _earlier:
        release(_earlier.pop())
    run(msgspec.convert(job, ConversionJob), RankInfo.from_environment(), fresh_store())
