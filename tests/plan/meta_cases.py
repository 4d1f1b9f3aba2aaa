"""Bytes of the real policy of any rank of any world: what a worker process runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from grpo_megatron.trace.step import building  # isort: skip  # before Megatron
import torch

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.plan.memory import vocabulary_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.trainer.megatron import policy
from grpo_megatron.trainer.megatron.static_bytes import static_bytes_of
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.steps.critic import build_critic


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


def real_parameters(recipe: str, overrides: list[str]) -> dict[str, int]:
    """Elements of what the trainer of a recipe builds on its only rank: the policy without
    adapters, what is trained, and a critic of its own."""
    config = resolve(recipe, overrides).config
    with building(config.trainer, 0):
        built = _policy_of(config)
        of_critic = 0
        if config.critic is not None and config.has_own_critic:
            of_critic = _count(build_critic(config, config.critic, built).model)
        trained = 0
        if config.trains:
            trained = _count(built, lambda _, weight: weight.requires_grad)
        found = {
            "parameters": _count(built, lambda name, _: ".adapters." not in name),
            "trained": trained,
            "critic": of_critic,
        }
    return found


def real_bytes_of_run(recipe: str, overrides: list[str], rank: int) -> dict[str, int]:
    """Bytes that the trainer of a recipe allocates for its policy on `rank`."""
    config = resolve(recipe, overrides).config
    with building(config.trainer, rank):
        built = _policy_of(config)
        create_adam_state(built.optimizer)
        return static_bytes_of(built).parts


def _policy_of(config: RunConfig) -> policy.Policy:
    hf = dict(configuration_of(config.model)[0])
    hf["vocab_size"] = vocabulary_of(hf, config.model)
    return policy.policy_of_run(config, hf, is_cold=config.cold_start is not None)


def _count(built: policy.Policy, counts: Callable[[str, torch.Tensor], bool] | None = None) -> int:
    """Add up the elements of a model's parameters, or of those that `counts`."""
    total = 0
    for chunk in built.chunks:
        for name, weight in chunk.module.named_parameters():
            if counts is None or counts(name, weight):
                total += weight.numel()
    return total


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
