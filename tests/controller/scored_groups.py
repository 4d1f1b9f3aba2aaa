"""Scored groups and a recipe for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.batching.spool import store_groups
from grpo_megatron.config.run import RunConfig
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan

REWARD = "grpo_megatron.rewards.functions:exact_match"


def recipe(domains=("d",), **tables) -> RunConfig:
    """Each domain has the components `right` (first) and `short`."""
    rewards = [{"function": REWARD, "name": "right"}, {"function": REWARD, "name": "short"}]
    return RunConfig.model_validate(
        {
            "name": "test",
            "model": {"preset": "tiny-qwen3-moe"},
            "domains": [
                {
                    "name": name,
                    "source": "reasoning_gym",
                    "dataset": "chain_sum",
                    "rewards": rewards,
                    **tables.pop(name, {}),
                }
                for name in domains
            ],
            "batch": {"num_prompts": 4, "num_samples_per_prompt": 4},
            **tables,
        }
    )


def prompt_of(name: str, domain: str = "d") -> Prompt:
    return Prompt(name, domain, name, (1, 2), "")


def stored(path: Path, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups as the controller has them: their completions in one shard of the new `path`."""
    in_store = store_groups(path, [scored.group for scored in groups])
    return [replace(scored, group=group) for scored, group in zip(groups, in_store, strict=True)]


def completion(length: int, version: int = 0, truncated: bool = False) -> Completion:
    return Completion(
        np.ones(length, np.int32),
        np.zeros(length, np.float32),
        (VersionSpan(version, 0, length),),
        "length" if truncated else "stop",
        "",
    )


def group(
    right,
    *,
    short=None,
    name: str = "p",
    domain: str = "d",
    version: int = 0,
    truncated=(),
    lengths=None,
) -> ScoredGroup:
    """Rewards are right + short; lengths are 1, 2, 3, … unless they are given; `truncated` lists
    sample indices."""
    values = np.array(right, float)
    other = np.zeros(len(values)) if short is None else np.array(short, float)
    lengths = lengths or range(1, len(values) + 1)
    completions = tuple(
        completion(length, version, index in truncated) for index, length in enumerate(lengths)
    )
    return ScoredGroup(
        RolloutGroup(prompt_of(name, domain), completions, 0),
        {"right": values, "short": other},
        values + other,
    )
