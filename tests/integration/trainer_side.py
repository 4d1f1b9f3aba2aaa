"""What the worker groups execute: a whole `TrainerService` that lives from case to case."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import TransferError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.protocol import error_reply
from grpo_megatron.trainer.requests import AnyRequest, read_request, to_json_values
from grpo_megatron.trainer.service import TrainerService
from grpo_megatron.weights.gather import all_gathered
from grpo_megatron.weights.publish_plan import Message
from grpo_megatron.weights.transfer import StreamSender
from tests.trainer.trainer_ranks import release
from tests.trainer.worker_group import fresh_store

_service: TrainerService | None = None


def start(config: RunConfig, model: str) -> None:
    """Build the trainer of `config`; the one before is forgotten."""
    global _service
    if _service is not None:
        release(_service.policy)
        if _service.critic is not None:
            release(_service.critic.model)
        _service = None
    initialize(config.trainer, RankInfo.from_environment(), fresh_store())
    seed_everything(config.seed)
    _service = TrainerService(config, Path(model))


def execute(request: AnyRequest) -> Any:
    """What the controller would ask of it."""
    return _service.execute(request)


def policy() -> Policy:
    """What it trains."""
    return _service.policy


def reply(values: dict[str, Any]) -> dict[str, Any]:
    """The answer that the controller would get, as JSON values: an error may be an engine's."""
    try:
        return {"result": to_json_values(execute(read_request(values)))}
    except TransferError as error:
        return error_reply(error)


def flip_a_bit(rank: int) -> None:
    """The next message of `rank` changes after its digests were taken."""
    sender = _service.model_sender
    if _service.adapter_sender is not None:
        sender = _service.adapter_sender
    for mine in sender.senders[:1]:
        if dist.get_rank() == rank:
            mine._pack = _corrupting_once(mine, mine._pack)


def _corrupting_once(sender: StreamSender, pack: Callable[..., Any]) -> Callable[..., Any]:
    def corrupt(message: Message, *arguments: Any) -> Any:
        data = pack(message, *arguments)
        data[message.offsets[0]] ^= 1
        sender._pack = pack
        return data

    return corrupt


def slow_down(seconds: float) -> None:
    """Every message of this rank takes longer."""
    for mine in _service.model_sender.senders:
        mine._pack = _slow(mine._pack, seconds)


def _slow(pack: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return pack(*arguments)

    return slow


def sent_bytes() -> list[int]:
    """What each rank contributes to a publish."""
    own = 0
    for sender in _service.model_sender.senders:
        own += sum(message.num_bytes for message in sender.messages.values())
    return all_gathered(own)
