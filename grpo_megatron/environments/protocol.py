"""What an environment is: it begins an episode, replies to the policy, and says what it was worth.

    environment = bind("calculator", {}).make()
    observation = await environment.reset(Problem("What is 37 * 48?", "1776"), seed=7)
    step = await environment.step(Reply("", (ToolCall("calculate", {"expression": "37*48"}),)))
    step = await environment.step(Reply("The answer is 1776."))
    assert step.done and step.outcome.reward == 1.0
    await environment.close()

An environment object has one episode. Many of them share a process and its event loop: what waits
is awaited. The same seed, problem and replies give the same episode; all episodes of a group have
the same seed, so that they begin in the same state.

One's own is any class with these three methods; docs/environments.md says how a recipe names it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_megatron.data.conversation import Message
from grpo_megatron.types import Problem

ToolSchema = dict[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": …, "description": …,
"parameters": JSON schema}}`."""


class Unscorable(Exception):
    """The episode cannot be scored, through no fault of the policy: its sample has no reward (NaN)
    and stays out of the statistics. Environments may raise it, hosts do for crashes and hangs."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = str(reason)  # environments may raise it with anything


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote: `ToolCall("calculate", {"expression": "2 + 2"}, "call-0")`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy: its text, and the calls that were read in it."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    """What is wrong with a call that could not be read; None: nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth. A reward of NaN: it cannot be scored."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """How an episode begins."""

    messages: tuple[Message, ...]
    """The whole conversation before the first turn, system message included."""
    tools: tuple[ToolSchema, ...] = ()
    state: str = ""
    """Names the state in which the next turn begins; equal states have equal names, in all episodes
    of a group."""
    outcome: Outcome = Outcome(0.0)
    """What the episode is worth if it is ended before a step, for example by its token budget."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment does with a turn."""

    messages: tuple[Message, ...] = ()
    """Its replies, in the order in which the policy sees them; none where the episode is done."""
    reward: float = math.nan
    """Of this turn alone; NaN: none."""
    done: bool = False
    state: str = ""
    """As of `Observation`, behind this turn."""
    spoilt: bool = False
    """Whether the environment has failed, so that the episode ends and cannot be scored."""
    outcome: Outcome | None = None
    """What the episode is worth if it ends here; the last step has one. None: as before."""


class Environment(Protocol):
    """One episode. `reset` is called once, then `step` for every turn until one is done or the
    episode is ended from outside, then `close`, in any case and once."""

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin. The problem's metadata has `messages`, the conversation made of its question by
        the recipe (`tools.first_messages`). Raises Unscorable where it cannot."""
        ...

    async def step(self, reply: Reply) -> Step:
        """Reply to a turn. Raises Unscorable where it cannot."""
        ...

    async def close(self) -> None:
        """Give back what the episode holds."""
        ...
