"""One record per arrow of the data flow. Shape legend: T_p prompt tokens, T completion tokens,
K experts per token, G samples per prompt.

`Problem -> Prompt -> RolloutGroup -> ScoredGroup -> SampleTable (batching.store)`"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Problem:
    """Before templates and tokens: `Problem("What is 37 + 48?", "85", {"a": "37 + 48"})`."""

    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what else the source knows


@dataclass(frozen=True, slots=True)
class Prompt:
    """`Prompt("add-17", "addition", "37+48=", (5, 9, 12, 6, 10, 13), "85", {})`."""

    prompt_id: str
    domain: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens `[start, end)` were sampled with weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Token ids that top-k, top-p and min-p left, for each of T tokens; none: not known."""

    ids: np.ndarray  # int32, set after set
    offsets: np.ndarray  # int64 [T+1]

    @property
    def sizes(self) -> np.ndarray:
        """int64 [T]"""
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Completion:
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], processed (after temperature)
    versions: tuple[VersionSpan, ...]  # cover [0, T) without gaps
    finish_reason: str  # "stop" or "length"; "abort" only of a segment, see rollout.segments
    text: str
    routes: np.ndarray | None = None
    """uint8/uint16 [T_p + T - 1, all layers, K]; None: not recorded. Row p is the forward of
    position p, which sampled token p + 1; the last token has none."""
    route_versions: tuple[VersionSpan, ...] = ()
    """Rows `[start, end)` of `routes` are of weight version `version`; others have no route."""
    kept: SamplingMask | None = None
    """What truncated sampling could have chosen at every token; None: anything."""

    context: tuple[int, ...] = ()
    """Token ids between the group's prompt and these: of a guided retry, never trained."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All G completions of one prompt, with the engine that sampled them."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    replica: int

    def by_context(self) -> list["RolloutGroup"]:
        """In parts: neighbours with the same `context`, which ends the prompt of their part."""
        return [
            RolloutGroup(
                replace(self.prompt, token_ids=self.prompt.token_ids + context),
                tuple(run),
                self.replica,
            )
            for context, run in groupby(self.completions, lambda c: c.context)
        ]


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with its rewards. `components[name][g]` is NaN where a component was skipped."""

    group: RolloutGroup
    components: Mapping[str, np.ndarray]  # name -> float64 [G]
    rewards: np.ndarray  # float64 [G]; NaN: unscorable
    steps: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per sample, weighted step rewards: (end of the step in the text, reward)."""
