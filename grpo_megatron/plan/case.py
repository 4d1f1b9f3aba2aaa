"""One layout under test: what the rules look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.machine import Engines
from grpo_megatron.plan.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer and a rollout layout for one model on one machine."""

    trainer: TrainerConfig
    rollout: RolloutConfig
    facts: ModelFacts
    engines: Engines

    def with_value(self, key: str, value: Any) -> Case:
        """The same case with one other value."""
        table, name = key.split(".")
        changed = getattr(self, table).model_copy(update={name: value})
        return replace(self, **{table: changed})
