"""`[[domains]]` and `[data]`: where prompts come from and how answers are scored."""

from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.objective import DomainObjective


class RewardConfig(Strict):
    """One reward component."""

    function: str
    """`module:function`, a typed plain function (see `grpo_megatron.rewards.functions`)."""
    weight: float = 1.0
    """Weight in the sum."""
    name: str | None = None
    """Name in metrics; default: the function's."""
    arguments: dict[str, Any] = {}
    """Keyword arguments passed to every call."""

    @property
    def component(self) -> str:
        """Name of the component."""
        return self.name or self.function.rpartition(":")[2]


class DomainConfig(Strict):
    """One domain: a source of prompts with verifiable answers, and its rewards."""

    name: str
    """Name in metrics."""
    source: Literal["reasoning_gym", "file"]
    """`reasoning_gym`: procedural problems; `file`: JSONL or Parquet."""
    dataset: str | None = None
    """reasoning-gym data set, for example `chain_sum`."""
    arguments: dict[str, Any] = {}
    """Arguments of the reasoning-gym data set, for example `{min_digits = 2}`."""
    path: InputPath | None = None
    """JSONL or Parquet file."""
    prompt_field: str = "question"
    """Field that holds the question (reasoning-gym: `question`)."""
    answer_field: str = "answer"
    """Field that holds the expected answer."""
    num_problems: int | None = Field(None, ge=1)
    """How many problems to draw (reasoning-gym) or to read at most (file)."""
    template: str = "{question}"
    """Prompt template: `{question}`, `{answer}`-free; `{metadata[expression]}` reaches metadata."""
    weight: float = Field(1.0, gt=0)
    """Share of this domain in the training prompts, relative to the others."""
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    """Reward components; the reward is their weighted sum."""
    reward_clip: float | None = Field(None, gt=0)
    """Clip the weighted sum to ±reward_clip; default: not at all."""
    accuracy: str | None = None
    """Reward component that says whether a completion is correct; default: the first."""
    accuracy_threshold: float = 1.0
    """A completion is correct if that component is at least this."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest completion of this domain; default: `rollout.max_new_tokens`."""
    keep_routing_weight: float | None = Field(None, ge=0)
    """Weight of `routing.keep_loss` for this domain; default: `routing.keep_weight`."""
    reference: InputPath | None = None
    """Hugging Face checkpoint that this domain's KL refers to; default: the policy at the start
    of RL."""
    objective: DomainObjective | None = None
    """What this domain sets differently from `[objective]`."""


class DataConfig(Strict):
    """Splits, made by a hash of the prompt text, so that equal prompts share a split."""

    num_validation: int = Field(512, ge=0)
    """Prompts kept out of training, used while training."""
    num_heldout: int = Field(1024, ge=0)
    """Prompts kept out of training and validation, used for the final accuracy."""
    reward_timeout_s: float = Field(5.0, gt=0)
    """Hard limit per reward call; past it the worker is killed (a coroutine is cancelled), the
    sample is unscorable."""
    reward_workers: int = Field(1, ge=1)
    """Reward processes."""
    reward_concurrency: int = Field(16, ge=1)
    """Coroutines of async rewards that one reward process runs at a time."""
