"""Publishing, replays and conversions, executed by ranks with a pretended GPU and by plain ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from msgspec.structs import asdict

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import PublishConfig
from grpo_megatron.trainer.conversion_worker import ConversionJob, run
from grpo_megatron.trainer.megatron.process_groups import RankInfo
from grpo_megatron.trainer.model_sender import ModelSender
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.transfer import WeightReceiver
from tests.trainer.trainer_ranks import Setup, _earlier, release
from tests.trainer.worker_group import fresh_store


def publish(model: str, layout: dict[str, Any], num_senders: int) -> dict[str, Any]:
    """Send the weights once to a receiver beside rank 0; both sides' digests, and what arrived."""
    setup = Setup(model, layout)
    sender = ModelSender(setup.policy.sharded, PublishConfig(num_senders=num_senders))
    opened = sender.open(num_workers=1)
    arrived: dict[str, Any] = {}

    def receive() -> None:
        receiver = WeightReceiver(opened.senders, rank=1, world_size=2, timeout_s=120)
        arrived["digests"] = receiver.receive(opened.plan, keep, publish=3)

    def keep(tensors: list[tuple[str, Any]]) -> None:
        for name, tensor in tensors:
            arrived[name] = (str(tensor.device), tuple(tensor.shape))

    engine = threading.Thread(target=receive)
    if dist.get_rank() == 0:
        engine.start()
    sender.join()
    digests = sender.send(3)
    if dist.get_rank() == 0:
        engine.join()
    return {"sent": digests, "received": arrived.pop("digests", {}), "tensors": arrived}


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
