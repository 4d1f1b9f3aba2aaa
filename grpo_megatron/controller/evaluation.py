"""Greedy accuracy of the published weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_megatron.controller.session import Session
from grpo_megatron.types import Prompt, RolloutGroup


async def greedy_accuracy(session: Session, prompts: Sequence[Prompt]) -> float:
    """Fraction of prompts whose most likely answer gets full marks from the first reward."""
    limit = session.config.rollout.max_new_tokens
    completions = await session.worker.greedy(prompts, limit)
    groups = [RolloutGroup(prompt, (completion,), 0)
              for prompt, completion in zip(prompts, completions, strict=True)]
    scored = await session.rewards.score(groups)
    first = np.array([next(iter(group.components.values()))[0] for group in scored])
    return float(np.mean(np.nan_to_num(first) >= 1.0))
