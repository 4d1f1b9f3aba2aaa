"""What the trainer tells the controller about a trained step."""

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from grpo_megatron.algorithms.stats import Stats


class TrainReport(TypedDict):
    """The report of one recorded step, equal on all ranks; it travels as JSON."""

    metrics: dict[str, float]
    """By name, means over the step."""
    normalisers: dict[str, str]
    """What each metric is a mean over: tokens, samples, updates, ..."""
    state: dict[str, Any]
    """What the objective learned so far (`Objective.state`)."""
    updates: int
    """Optimizer steps that were taken."""
    losses: list[float]
    """Of each optimizer step."""
    grad_norms: list[float]
    """Of each optimizer step, before clipping."""
    tokens: int
    """Prompt and policy tokens that were trained."""
    old_logprobs_s: float
    """Seconds of the passes before the first optimizer step."""
    train_s: NotRequired[float]
    """Seconds of the whole step, in the trainer."""


def losses_and_norms(updates: Sequence[Stats]) -> tuple[list[float], list[float]]:
    """Return the loss and the pre-clip gradient norm of every optimizer step."""
    losses = []
    grad_norms = []
    for stats in updates:
        found = stats.result()
        losses.append(found["loss/value"])
        grad_norms.append(found["grad/norm"])
    return losses, grad_norms
