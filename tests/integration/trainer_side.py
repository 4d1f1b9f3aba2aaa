"""What the worker groups execute: a whole `TrainerService` that lives from case to case."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import TransferError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.protocol import error_reply
from grpo_megatron.trainer.requests import AnyRequest, read_request, to_json_values
from grpo_megatron.trainer.service import TrainerService
from tests.trainer.trainer_ranks import release
from tests.trainer.worker_group import fresh_store

_service: TrainerService | None = None


def start(config: RunConfig, model: str) -> None:
    """Build the trainer of `config`; the one before is forgotten."""
    global _service
    if _service is not None:
        release(_service.policy)
        _service = None
    initialize(config.trainer, RankInfo.from_environment(), fresh_store())
    seed_everything(config.seed)
    _service = TrainerService(config, Path(model))


def execute(request: AnyRequest) -> Any:
    """What the controller would ask of it."""
    return _service.execute(request)


def reply(values: dict[str, Any]) -> dict[str, Any]:
    """The answer that the controller would get, as JSON values: an error may be an engine's."""
    try:
        return {"result": to_json_values(execute(read_request(values)))}
    except TransferError as error:
        return error_reply(error)


def flip_a_bit(sender: int) -> None:
    """The next bucket of `sender` changes after its digests were taken."""
    mine = _service.model_sender.sender
    if mine is None or mine.index != sender:
        return
    pack = mine._pack

    def corrupt(*arguments):
        data = pack(*arguments)
        data[5] ^= 1
        mine._pack = pack
        return data

    mine._pack = corrupt


def slow_down(seconds: float) -> None:
    """Every bucket of this rank's sender takes longer."""
    mine = _service.model_sender.sender
    if mine is not None:
        pack = mine._pack
        mine._pack = lambda *arguments: (time.sleep(seconds), pack(*arguments))[1]


def routes() -> list[tuple[str, int, tuple[int, ...]]]:
    """Of every Megatron tensor in sending order: name, the rank that sends, ranks that hold."""
    model_sender = _service.model_sender
    return [
        (entry.parameter.name, sender, entry.holders)
        for sender, part in model_sender.parts.items()
        for entry in part
    ]
