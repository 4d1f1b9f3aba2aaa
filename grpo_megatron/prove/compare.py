"""Hold what two sides computed against each other, within stated tolerances."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.prove.evidence import Recorder
from grpo_megatron.prove.requests import TrainedSteps


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences that rounding explains."""

    logprob: float
    """Largest |difference| of a token's log-prob, in nats."""
    loss: float
    """Largest |difference| of a step's loss; losses are near 0 in the first step."""
    grad_norm: float
    """Largest difference of a pre-clip gradient norm, relative to it."""

    def __str__(self) -> str:
        return (
            f"log-probs {self.logprob:g}, losses {self.loss:g}, gradient norms "
            f"{self.grad_norm:g} relative"
        )


FLOAT32 = Tolerance(logprob=2e-4, loss=2e-4, grad_norm=5e-3)
"""One computation in float32 on two devices, or at two layouts, over three optimizer steps."""


def compare_steps(
    recorder: Recorder, name: str, found: TrainedSteps, expected: TrainedSteps, most: Tolerance
) -> None:
    """Record whether log-probs, losses and gradient norms of `name` are those expected."""
    logprob = largest_difference(found.logprobs, expected.logprobs)
    recorder.check(
        f"{name}: log-probs of {len(expected.logprobs)} tokens agree",
        logprob <= most.logprob,
        f"largest difference {logprob:.2g} nats, allowed {most.logprob:g}",
    )
    loss = largest_difference(found.losses, expected.losses)
    recorder.check(
        f"{name}: losses of {len(expected.losses)} optimizer steps agree",
        loss <= most.loss,
        f"largest difference {loss:.2g}, allowed {most.loss:g}; {_written(expected.losses)}",
    )
    norm = largest_relative_difference(found.grad_norms, expected.grad_norms)
    recorder.check(
        f"{name}: gradient norms before clipping agree",
        norm <= most.grad_norm,
        f"largest relative difference {norm:.2g}, allowed {most.grad_norm:g}; "
        f"{_written(expected.grad_norms)}",
    )


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest |difference|; infinite where the lengths differ or something is no
    number."""
    if len(found) != len(expected) or not len(expected):
        return math.inf
    largest = float(np.abs(np.array(found) - np.array(expected)).max())
    if math.isnan(largest):
        return math.inf
    return largest


def largest_relative_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest |difference| relative to what was expected; infinite as above."""
    if len(found) != len(expected) or not all(expected):
        return math.inf
    shares = [one / other for one, other in zip(found, expected, strict=True)]
    return largest_difference(shares, [1.0] * len(shares))


def _written(values: Sequence[float]) -> str:
    """`0.0012, -0.34`."""
    return ", ".join(f"{value:.3g}" for value in values)
