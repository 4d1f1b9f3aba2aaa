"""`[objective]` and `[batch]`: the policy-gradient objective as independent choices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class ObjectiveConfig(Strict):
    """Choices left unset take the preset's value (`algorithms/presets.py`)."""

    preset: Literal["gspo", "grpo"] = "gspo"
    """Fixed, documented combination of the choices below."""
    advantage_std: Literal["none", "group"] | None = None
    """Divide centred rewards by the group's standard deviation, or not."""
    ratio: Literal["token", "sequence_geo"] | None = None
    """Level of the update ratio."""
    clip_low: float | None = Field(None, gt=0, lt=1)
    """Lower clip distance: the ratio is kept above `1 - clip_low`."""
    clip_high: float | None = Field(None, gt=0)
    """Upper clip distance: the ratio is kept below `1 + clip_high`."""
    aggregation: Literal["seq_mean_token_mean", "token_mean"] | None = None
    """How per-token losses become one number."""
    shuffle_advantages: bool = False
    """Negative control: permute advantages over the batch. Must not learn."""


class BatchConfig(Strict):
    """What one RL step is made of."""

    num_prompts: int = Field(32, ge=1)
    """Prompts a step."""
    num_samples_per_prompt: int = Field(16, ge=1)
    """Group size G."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts; the batch is split by prompt."""
    max_staleness: int = Field(0, ge=0, le=1)
    """0: strictly on-policy. 1: rollouts for step k+1 run while step k trains."""
