"""The answers of a data set, written as rollout workers write the policy's."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron.batching.spool import store_groups
from grpo_megatron.data.dataset_answers import DatasetAnswers
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import Prompt, RolloutGroup, StoredCompletion


class DatasetRollouts:
    """Stands in the place of the rollout workers; writes below `spool`."""

    def __init__(self, answers: DatasetAnswers, spool: Path, route_shape: RouteShape | None):
        self._answers = answers
        self._spool = spool
        self._route_shape = route_shape
        self._numbers = itertools.count()

    async def rollouts(
        self, step: int, prompts: Sequence[Prompt]
    ) -> list[RolloutGroup[StoredCompletion]]:
        """Return the groups of `prompts`, in their order. Raises SetupError where they cannot be
        written."""
        if not prompts:
            return []
        path = self._spool / f"dataset-{next(self._numbers):06d}"
        groups = await self._answers.rollouts(step, prompts)
        return await asyncio.to_thread(store_groups, path, groups, self._route_shape)
