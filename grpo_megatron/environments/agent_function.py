"""An agent program that is a coroutine: `async def agent(problem, client) -> float | None`.

    async def agent(problem: Problem, client: ClientSettings) -> float | None:
        openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
        ...

It has its episodes where environments have theirs (`host.py`), many in one process: `step` runs the
whole of it. What it returns is the outcome; None leaves the episode to the domain's rewards."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_megatron.config.imports import imported
from grpo_megatron.environments.protocol import Observation, Outcome, Reply, Step
from grpo_megatron.environments.registry import traits
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem

_CLIENT = "client"
_METADATA = "metadata"
_BEGUN = ({"role": "user", "content": "begin"},)
_NO_REWARD = "no reward"


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How a program asks the policy, with any client of OpenAI's API."""

    base_url: str
    api_key: str
    model: str
    seed: int
    """For what the program draws itself: equal for all samples of a group."""


def _check(*, function: str, arguments: Mapping[str, Any]) -> None:
    """EpisodeError where there is no such coroutine, or it cannot be called with these."""
    found = imported(function, EpisodeError, "agent")
    if not inspect.iscoroutinefunction(found):
        raise EpisodeError(
            f"agent {function} is no `async def`",
            remedy="write `async def agent(problem, client) -> float | None`",
        )
    signature = inspect.signature(found)
    try:
        signature.bind(None, None, **arguments)
    except TypeError as error:
        raise EpisodeError(
            f"agent {function}{signature} cannot be called with problem, client and the recipe's "
            f"arguments: {error}",
            remedy="correct domains.agent.arguments, or the function",
        ) from error


@traits(check=_check, network=True)
class AgentFunction:
    """One run of the function, as an environment."""

    def __init__(self, *, function: str, arguments: Mapping[str, Any]):
        self._function = imported(function, EpisodeError, "agent")
        self._arguments = arguments

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Take the problem and what the program needs to ask (`packed`)."""
        self._client = ClientSettings(**problem.metadata[_CLIENT])
        self._problem = Problem(problem.question, problem.answer, problem.metadata[_METADATA])
        return Observation(_BEGUN)

    async def step(self, reply: Reply) -> Step:
        """Run the program. Raises what it raises."""
        reward = await self._function(self._problem, self._client, **self._arguments)
        if reward is None:
            return Step(done=True, state=_NO_REWARD, outcome=Outcome(math.nan))
        return Step(done=True, outcome=Outcome(reward))

    async def close(self) -> None:
        """Nothing is held."""


def packed(problem: Problem, client: ClientSettings) -> Problem:
    """Both as one problem, for `AgentFunction.reset`."""
    metadata = {_METADATA: dict(problem.metadata), _CLIENT: asdict(client)}
    return Problem(problem.question, problem.answer, metadata)


def reward_of(step: Step) -> float | None:
    """Return what the function returned, which may be NaN."""
    if step.state == _NO_REWARD or step.outcome is None:
        return None
    return step.outcome.reward
