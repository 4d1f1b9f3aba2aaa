"""The best and the worst completions of a step, readable: extremes tell more than averages."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import ScoredGroup


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with its scores; None where a number is not known."""

    rank: str  # "best" or "worst"
    step: int
    prompt_id: str
    domain: str
    prompt: str
    answer: str
    completion: str
    reward: float
    components: Mapping[str, float | None]
    length: int  # completion tokens
    finish_reason: str  # "stop" or "length"


def extremes(step: int, groups: Sequence[ScoredGroup],
             count: int) -> tuple[list[Sample], list[Sample]]:
    """The `count` best and the `count` worst completions of a step, at most one a group, by reward,
    then by its distance from the group's mean (a success where others failed comes first)."""
    def chosen(rank: str, sign: float) -> list[Sample]:
        heads = []
        for number, group in enumerate(groups):
            mean = np.nanmean(group.rewards) if np.isfinite(group.rewards).any() else math.nan
            keys = [(sign * reward, sign * (reward - mean), number, index)
                    for index, reward in enumerate(group.rewards.tolist()) if reward == reward]
            heads += [min(keys)] if keys else []
        return [_sample(rank, step, groups[number], index)
                for *_, number, index in sorted(heads)[:count]]

    return chosen("best", -1.0), chosen("worst", 1.0)


def write_samples(run_dir: RunDir, step: int, samples: Iterable[Sample]) -> Path:
    """Write samples/step_000123.jsonl, whole or not at all; replaces the step's earlier file."""
    path = run_dir.samples / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n"
                                   for sample in samples))
    return path


def _sample(rank: str, step: int, group: ScoredGroup, index: int) -> Sample:
    prompt, completion = group.group.prompt, group.group.completions[index]
    components = {name: float(values[index]) if math.isfinite(values[index]) else None
                  for name, values in group.components.items()}
    return Sample(rank, step, prompt.prompt_id, prompt.domain, prompt.text, prompt.answer,
                  completion.text, float(group.rewards[index]), components,
                  len(completion.token_ids), completion.finish_reason)
