"""Groups, domains and a way to run the pool in a plain test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup

HOSTILE = "tests.rewards.hostile"


def domain(*functions: str | dict[str, Any], name: str = "d", **fields: Any) -> DomainConfig:
    rewards = [{"function": f} if isinstance(f, str) else f for f in functions]
    return DomainConfig(name=name, source="reasoning_gym", rewards=rewards, **fields)


def group(texts: Sequence[str], *, name: str = "d", answer: str = "85") -> RolloutGroup:
    ids = np.zeros(1, dtype=np.int32)
    return RolloutGroup(
        Prompt(f"{name}-1", name, "37 + 48 =", (1, 2), answer, {"level": 1}),
        tuple(Completion(ids, np.zeros(1, np.float32), (), "stop", text) for text in texts),
        0,
    )


def score(
    domains: Sequence[DomainConfig], groups: Sequence[RolloutGroup], **options: Any
) -> tuple[list[ScoredGroup], RewardPool]:
    """Score once in a new pool, which is closed afterwards."""

    async def run() -> tuple[list[ScoredGroup], RewardPool]:
        async with RewardPool(domains, **options) as pool:
            return await pool.score(groups), pool

    return asyncio.run(run())
