"""`[[domains]]` and `[data]`: where prompts come from and how answers are scored."""

from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.objective import DomainObjective


class RewardConfig(Strict):
    """One reward component."""

    function: str
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = {}

    @property
    def component(self) -> str:
        return self.name or self.function.rpartition(":")[2]


class DomainConfig(Strict):
    """One domain: a source of prompts with verifiable answers, and its rewards."""

    name: str
    source: Literal["reasoning_gym", "file"]
    dataset: str | None = None
    arguments: dict[str, Any] = {}
    path: InputPath | None = None
    prompt_field: str = "question"
    answer_field: str = "answer"
    num_problems: int | None = Field(None, ge=1)
    template: str = "{question}"
    weight: float = Field(1.0, gt=0)
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    reward_clip: float | None = Field(None, gt=0)
    accuracy: str | None = None
    accuracy_threshold: float = 1.0
    max_new_tokens: int | None = Field(None, ge=1)
    keep_routing_weight: float | None = Field(None, ge=0)
    reference: InputPath | None = None
    objective: DomainObjective | None = None


class DataConfig(Strict):
    """Splits, made by a hash of the prompt text, so that equal prompts share a split."""

    num_validation: int = Field(512, ge=0)
    num_heldout: int = Field(1024, ge=0)
    reward_timeout_s: float = Field(5.0, gt=0)
    reward_workers: int = Field(1, ge=1)
    reward_concurrency: int = Field(16, ge=1)
