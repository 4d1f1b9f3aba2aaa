"""Greedy accuracy of the published weights."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.controller.selection import Selection
from grpo_megatron.controller.session import Session
from grpo_megatron.types import Prompt


async def greedy_accuracy(session: Session, prompts: Sequence[Prompt]) -> float:
    """Fraction of prompts whose most likely answer is correct; NaN of none."""
    if not prompts:
        return float("nan")
    groups = await session.worker.greedy(prompts, session.config.rollout.max_new_tokens)
    scored = await session.rewards.score(groups)
    selection = Selection(session.config)
    return float(np.mean([selection.correct(group)[0] == 1 for group in scored]))
