"""Cases as a user writes them, through the functions behind `objective eval`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.evaluate import evaluate_case
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.loader import load_objective


def evaluated(preset: str, overrides: Sequence[str] = (), /, **case: Any) -> dict[str, Any]:
    """`objective eval --objective PRESET OVERRIDES… CASE`."""
    parsed = parse_case(case)
    config, own = load_objective(preset, overrides, parsed.domains)
    return evaluate_case(Objective(config, parsed.domains, own), parsed)


def advantages(
    preset: str,
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    *overrides: str,
    **more: Any,
) -> list[list]:
    """Advantages by group of nested rewards."""
    flat = [r for group in rewards for r in group]
    counts = [int(n) for group in lengths for n in group]
    groups = [number for number, group in enumerate(rewards) for _ in group]
    found = evaluated(
        preset,
        overrides,
        rewards=flat,
        group_ids=groups,
        logprobs=[[-1.0] * n for n in counts],
        **more,
    )["advantages"]
    ends = np.cumsum([len(group) for group in rewards])
    return [found[end - len(group) : end] for group, end in zip(rewards, ends, strict=True)]


def flat(values: Any) -> list[float]:
    """Nested lists of any depth as one."""
    if not isinstance(values, list | tuple):
        return [float(values)]
    return [number for value in values for number in flat(value)]


def same(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(flat(found), flat(expected), rtol=0, atol=tolerance)
