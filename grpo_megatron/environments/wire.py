"""What a host and its processes tell one another: a line of JSON each.

The host checks every line against these types. NaN is null in JSON, so that each number that may be
NaN is one that may be null here."""

import math
from typing import Any

import msgspec

from grpo_megatron.data.conversation import Message
from grpo_megatron.environments.protocol import (
    Observation,
    Outcome,
    Reply,
    Step,
    ToolSchema,
)
from grpo_megatron.types import Problem

LONGEST_LINE = 1 << 23
"""Bytes of a line from an environment."""

_Number = float | None


class Begin(msgspec.Struct, frozen=True):
    """The first line to a process: what it runs, and within which limits."""

    name: str
    arguments: dict[str, Any]
    step_s: float
    characters: int
    memory_bytes: int
    network: bool


class Ready(msgspec.Struct, frozen=True):
    """The first line from a process; `error`: why it cannot begin."""

    error: str = ""


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode."""

    request: int
    episode: int
    question: str
    answer: str
    metadata: dict[str, Any]
    seed: int

    @property
    def problem(self) -> Problem:
        """The problem, as the environment takes it."""
        return Problem(self.question, self.answer, self.metadata)


class Act(msgspec.Struct, frozen=True, tag=True):
    """A turn of the policy."""

    request: int
    episode: int
    reply: Reply


class Close(msgspec.Struct, frozen=True, tag=True):
    """End an episode, whatever it is doing."""

    request: int
    episode: int


Request = Reset | Act | Close


class PackedOutcome(msgspec.Struct, frozen=True):
    """An outcome."""

    reward: _Number
    metrics: dict[str, _Number]

    @classmethod
    def of(cls, outcome: Outcome) -> "PackedOutcome":
        """Pack one."""
        metrics = {name: _packed(value) for name, value in outcome.metrics.items()}
        return cls(_packed(outcome.reward), metrics)

    @property
    def outcome(self) -> Outcome:
        """Unpack it."""
        metrics = {name: _unpacked(value) for name, value in self.metrics.items()}
        return Outcome(_unpacked(self.reward), metrics)


class PackedObservation(msgspec.Struct, frozen=True):
    """An observation."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    state: str
    worth: PackedOutcome

    @classmethod
    def of(cls, observation: Observation) -> "PackedObservation":
        """Pack one."""
        worth = PackedOutcome.of(observation.outcome)
        return cls(observation.messages, observation.tools, observation.state, worth)

    @property
    def observation(self) -> Observation:
        """Unpack it."""
        return Observation(self.messages, self.tools, self.state, self.worth.outcome)


class PackedStep(msgspec.Struct, frozen=True):
    """A step."""

    messages: tuple[Message, ...]
    reward: _Number
    done: bool
    state: str
    spoilt: bool
    worth: PackedOutcome | None

    @classmethod
    def of(cls, step: Step) -> "PackedStep":
        """Pack one."""
        worth = None
        if step.outcome is not None:
            worth = PackedOutcome.of(step.outcome)
        reward = _packed(step.reward)
        return cls(step.messages, reward, step.done, step.state, step.spoilt, worth)

    @property
    def step(self) -> Step:
        """Unpack it."""
        outcome = None
        if self.worth is not None:
            outcome = self.worth.outcome
        reward = _unpacked(self.reward)
        return Step(self.messages, reward, self.done, self.state, self.spoilt, outcome)


class Observed(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Reset`."""

    request: int
    observation: PackedObservation


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Act`."""

    request: int
    step: PackedStep


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Close`."""

    request: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The answer where there is no other; the episode cannot be scored."""

    request: int
    reason: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process is there, and its event loop runs."""


Answer = Observed | Stepped | Closed | Failed
ENCODER = msgspec.json.Encoder()
REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
ANSWERS: msgspec.json.Decoder[Answer | Beat] = msgspec.json.Decoder(Answer | Beat)


def line(message: Any) -> bytes:
    """Return a message as a line. Raises TypeError or ValueError for what is no JSON or no text."""
    try:
        return ENCODER.encode(message) + b"\n"
    except RecursionError as error:
        raise ValueError("a value of it contains itself, or is nested too deeply") from error


def too_long(num_bytes: int) -> str:
    """Return why a reply of so many bytes, or at least of so many, is none."""
    size = num_bytes / 2**20
    return f"its reply has {size:.1f} MiB, and may have {LONGEST_LINE >> 20}"


def _packed(value: float) -> _Number:
    if math.isnan(value):
        return None
    return value


def _unpacked(value: _Number) -> float:
    if value is None:
        return math.nan
    return value
