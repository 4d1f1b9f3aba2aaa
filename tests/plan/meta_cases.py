"""Bytes of the real policy of any rank of any world: what a worker process runs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from grpo_megatron.trace.step import building  # isort: skip  # before Megatron
import torch

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.trainer.megatron import policy
from grpo_megatron.trainer.megatron.static_bytes import static_bytes_of
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state


def real_bytes(
    hf: dict[str, Any],
    trainer: dict[str, Any],
    rank: int,
    router_policy: str = "freeze_bias",
    overlaps: bool = False,
    value_head: bool = False,
    lora: dict[str, Any] | None = None,
    trains: bool = True,
    head_beside: bool = False,
) -> dict[str, Any]:
    """Bytes that `build_policy` allocates on `rank`, and the sizes of its parameters by chunk; with
    `value_head`, of a critic with the policy's layers; with `head_beside`, of a policy with one."""
    layout = TrainerConfig(**trainer, overlap_communication=overlaps)
    with ExitStack() as stack:
        stack.enter_context(building(layout, rank))
        if value_head:
            hf = {**hf, "tie_word_embeddings": False}
            stack.enter_context(mock.patch.object(policy, "build_models", _critics))
        adapters = LoraConfig(**lora) if lora else None
        built = policy.build_policy(
            hf,
            layout,
            OptimizerConfig(),
            router_policy=router_policy,
            lora=adapters,
            has_value_head=head_beside,
            trains=trains,
        )
        create_adam_state(built.optimizer)
        found = static_bytes_of(built)
        return {**found.parts, "shapes": [list(sizes) for sizes in found.shapes]}


_build_models = policy.build_models


def _critics(
    config: Any, hf: dict[str, Any], layout: TrainerConfig, **settings: Any
) -> list[torch.nn.Module]:
    """The policy's model chunks, with one number a token in the place of the output layer."""
    models = _build_models(config, hf, layout, **settings)
    for model in models:
        if model.post_process:
            model.output_layer = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )
    return models
