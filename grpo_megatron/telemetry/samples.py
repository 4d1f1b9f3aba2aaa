"""The best and the worst completions of a step, readable: extremes tell more than averages."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import ScoredGroup

Sample = Mapping[str, Any]  # one completion with its scores, see `_sample`; None: not known


def extremes(step: int, groups: Sequence[ScoredGroup], count: int) -> list[Sample]:
    """The `count` best, then the `count` worst completions of a step, at most one a group, by
    reward, then by its distance from the group's mean (a lone success comes first)."""

    def chosen(rank: str, sign: float) -> list[Sample]:
        heads = []
        for number, group in enumerate(groups):
            mean = np.nanmean(group.rewards) if np.isfinite(group.rewards).any() else math.nan
            keys = [
                (sign * reward, sign * (reward - mean), number, index)
                for index, reward in enumerate(group.rewards.tolist())
                if reward == reward
            ]
            heads += [min(keys)] if keys else []
        return [
            {**_sample(rank, step, groups[number], index), "group": number, "index": index}
            for *_, number, index in sorted(heads)[:count]
        ]

    return chosen("best", -1.0) + chosen("worst", 1.0)


def write_samples(run_dir: RunDir, step: int, samples: Sequence[Sample]) -> Path:
    """Write samples/step_000123.jsonl, whole or not at all; replaces the step's earlier file."""
    path = run_dir.samples / f"step_{step:06d}.jsonl"
    write_atomically(
        path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    )
    return path


def _sample(rank: str, step: int, group: ScoredGroup, index: int) -> Sample:
    prompt = group.group.prompt
    completion = group.group.completions[index]
    return {
        "rank": rank,
        "step": step,
        "prompt_id": prompt.prompt_id,
        "domain": prompt.domain,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "completion": completion.text,
        "reward": float(group.rewards[index]),
        "components": {
            name: float(values[index]) if math.isfinite(values[index]) else None
            for name, values in group.components.items()
        },
        "length": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
