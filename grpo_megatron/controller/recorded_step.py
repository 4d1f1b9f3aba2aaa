"""A step whose samples are in the store, and what gives one after the other."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.controller.staleness_watch import SampledSeconds


@dataclass
class RecordedStep:
    """A step whose samples are in the store."""

    step: int
    directory: Path
    facts: StepFacts
    seconds: dict[str, float] = field(default_factory=dict)  # of its sampling, by phase
    logprob_check: dict[str, float] = field(default_factory=dict)  # its metrics, if one was made
    fresh: bool = False  # sampled just now
    sampling: SampledSeconds | None = None  # how long that took; None: it was in the store


class StepSource(Protocol):
    """Gives step after step, recorded."""

    async def sample(
        self,
        step: int,
        *,
        on_drawn: Callable[[], None] = lambda: None,
        before_recording: Callable[[], Awaitable[None]] | None = None,
    ) -> RecordedStep:
        """Return step `step`, recorded (see `StepSampler.sample`)."""
