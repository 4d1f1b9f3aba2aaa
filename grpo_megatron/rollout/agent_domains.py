"""The domains of a recipe whose episodes a program drives (`[domains.agent]`)."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple

from grpo_megatron import progress
from grpo_megatron.config.environment import AgentConfig
from grpo_megatron.environments.agent_function import ClientSettings, packed, reward_of
from grpo_megatron.environments.failures import EpisodeLost, Failures
from grpo_megatron.environments.protocol import Environment, Reply, Unscorable
from grpo_megatron.environments.tools import first_messages
from grpo_megatron.rollout.agent_command import run_command
from grpo_megatron.rollout.chat_protocol import MODEL
from grpo_megatron.rollout.conversation_session import ConversationSession
from grpo_megatron.rollout.door import Door, OpenSession
from grpo_megatron.rollout.episodes import EpisodeSeeds
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler
from grpo_megatron.types import Completion, Problem, Prompt

_BEAT_S = 5.0
_LIMIT_OUTCOME = 0.0
"""Of an episode that a limit of turns or tokens has ended and that its program says nothing of: the
policy has not come to an end."""

Program = Callable[[Problem, ClientSettings], Awaitable[float | None]]
"""Runs a program for one episode: the outcome, or None; raises Unscorable where it fails."""


class _Result(NamedTuple):
    """What is known of an episode when its program has ended."""

    outcome: float  # NaN: none, or it cannot be scored
    is_failed: bool


class AgentDomain:
    """Has programs play the episodes of one domain through the door. limits: of an episode with
    that many tokens at most."""

    def __init__(
        self,
        settings: AgentConfig,
        sampler: TurnSampler,
        door: Door,
        *,
        run: Program,
        limits: Callable[[int], EpisodeLimits],
        failures: Failures,
    ):
        self._sampler = sampler
        self._door = door
        self._run = run
        self._limits = limits
        self._failures = failures
        self._free = asyncio.Semaphore(settings.concurrency)

    @property
    def last_failure(self) -> str:
        """Why the last episode that could not be scored could not; empty: there was none."""
        return self._failures.last

    async def play(
        self, ask: Ask, prompt: Prompt, seeds: EpisodeSeeds, max_tokens: int
    ) -> Completion:
        """Play an episode of at most `max_tokens` behind its prompt.

        One whose program fails cannot be scored. Raises EpisodeError where programs have failed too
        often; DataError where the tokens of turns cannot be proved; and what `ask` raises."""
        self._failures.check()
        problem = Problem(prompt.question, prompt.answer, prompt.metadata)
        # a template that cannot be proved is no program's fault
        self._sampler.turn_tokens((), first_messages(problem))
        limits = self._limits(max_tokens)
        async with self._free:
            session = ConversationSession(ask, self._sampler, limits, seeds.turns)
            with self._door.serving(session) as opened:
                result = await self._result(opened, problem, seeds)
        found = session.completion(result.outcome, is_spoilt=result.is_failed)
        if found is not None:
            return found
        if not result.is_failed:
            self._failed("the program asked for no turn")
        builder = await self._sampler.stand_in(ask, problem, seeds.turns, limits)
        stand_in = self._sampler.sequence(builder, "stop")
        return replace(stand_in, outcome=math.nan)

    def take_metrics(self) -> dict[str, float]:
        """Return how its episodes have ended since the last call; see `Failures.take_metrics`."""
        return self._failures.take_metrics()

    async def _result(self, opened: OpenSession, problem: Problem, seeds: EpisodeSeeds) -> _Result:
        """Run the program to its end."""
        client = ClientSettings(opened.url, opened.key, MODEL, seeds.environment)
        session = opened.session
        try:
            reward = _finite(await _unless_engines_fail(self._run(problem, client), opened))
        except Unscorable as error:
            if session.is_limited:
                return self._ended_by_limit(session)
            self._failed(error.reason, is_lost=isinstance(error, EpisodeLost))
            return _Result(math.nan, True)
        if reward is None:
            if session.is_limited:
                return self._ended_by_limit(session)
            reward = math.nan
        if session.num_turns:
            self._failures.finished()
        return _Result(reward, False)

    def _ended_by_limit(self, session: ConversationSession) -> _Result:
        """Return what an episode is worth that its program has not brought to an end."""
        if session.num_turns:
            self._failures.finished()
        return _Result(_LIMIT_OUTCOME, False)

    def _failed(self, reason: str, *, is_lost: bool = False) -> None:
        """is_lost: with the process of its function."""
        self._failures.add("spoilt", reason, is_lost=is_lost)


def command_program(settings: AgentConfig) -> Program:
    """Make a program of a command."""

    async def run(problem: Problem, client: ClientSettings) -> float | None:
        return await run_command(
            settings.command, settings.variables, problem, client, settings.episode_s
        )

    return run


def function_program(open_environment: Callable[[], Environment]) -> Program:
    """Make a program of a function, which a process of environments runs."""

    async def run(problem: Problem, client: ClientSettings) -> float | None:
        environment = open_environment()
        try:
            await environment.reset(packed(problem, client), client.seed)
            return reward_of(await environment.step(Reply("")))
        finally:
            await environment.close()

    return run


def _finite(reward: float | None) -> float | None:
    """Return the reward. Unscorable where it is no number."""
    if reward is not None and math.isnan(reward):
        raise Unscorable("the program's reward is no finite number")
    return reward


async def _unless_engines_fail(
    running: Awaitable[float | None], opened: OpenSession
) -> float | None:
    """Return what the program comes to; an error of the engines ends it, and is raised."""
    program = asyncio.ensure_future(running)
    both: list[asyncio.Future[Any]] = [program, opened.failure]
    try:
        while not any(future.done() for future in both):
            await asyncio.wait(both, timeout=_BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            progress.advance()  # it waits for a program, whose time is limited, and does not hang
        if opened.failure.done():
            opened.failure.result()
        return await program
    finally:
        program.cancel()
        await asyncio.gather(program, return_exceptions=True)
