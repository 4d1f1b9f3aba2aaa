"""An episode on an engine: turns of the policy, and what the environment says between them.

Each turn is one completion behind all tokens so far (`rollout.segments`). What was sampled is never
decoded and encoded again (`data.turn_tokens`)."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron import progress
from grpo_megatron.data.conversation import Message, conversation_of
from grpo_megatron.data.turn_tokens import NextTurn, TurnState
from grpo_megatron.environments.protocol import (
    Environment,
    Observation,
    Outcome,
    Step,
    Unscorable,
)
from grpo_megatron.errors import DataError
from grpo_megatron.rollout.beginnings import Beginnings
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.sequence_builder import SequenceBuilder
from grpo_megatron.rollout.tool_parsers import with_refused_calls
from grpo_megatron.rollout.turn_sampler import (
    EpisodeLimits,
    TurnSampler,
)
from grpo_megatron.types import Completion, Problem

logger = logging.getLogger(__name__)

_UNSCORABLE = Outcome(math.nan)
_MOST_LOGGED = 50
_MOST_WITHOUT_ROOM = 256
"""Groups whose episodes cannot begin, without one that begins in between."""


@dataclass(frozen=True, slots=True)
class EpisodeSeeds:
    """What an episode depends on beside the policy."""

    environment: int
    """Equal for all episodes of a group."""
    turns: int | None
    """Of the sampling; None: the engine's own."""


class EpisodePlayer(TurnSampler):
    """Plays the episodes of one domain with its environments.

    same_beginning: an episode that begins otherwise than another of its group cannot be scored.
    Other arguments are those of `TurnSampler`.

    Attributes:
        num_begun_otherwise: Such episodes so far."""

    def __init__(self, *, same_beginning: bool = True, **sampler: Any):
        super().__init__(**sampler)
        self._beginnings: Beginnings | None = None
        if same_beginning:
            self._beginnings = Beginnings()
        self.num_begun_otherwise = 0
        self._warn = _Warnings()
        self._without_room = _WithoutRoom()

    async def play(
        self,
        ask: Ask,
        environment: Environment,
        problem: Problem,
        seeds: EpisodeSeeds,
        limits: EpisodeLimits,
    ) -> Completion:
        """Play one episode; all sequences have `answered_ids`.

        One that cannot be scored has an outcome of NaN: its environment fails, begins it otherwise
        than another of its group, or with more than the engine takes. Raises DataError where the
        tokens of a turn cannot be proved, or no episode finds room to begin; and what `ask`
        raises."""
        episode = _Episode(self, ask, environment, problem, seeds, limits)
        try:
            await episode.play()
        finally:
            await environment.close()
        return episode.completion()

    def require_same_beginning(
        self, problem: Problem, seeds: EpisodeSeeds, observation: Observation
    ) -> None:
        """Raise Unscorable where an episode begins otherwise than another of its group."""
        if self._beginnings is None:
            return
        try:
            group = (problem.question, seeds.environment)
            self._beginnings.require_same(group, observation)
        except Unscorable as error:
            self.num_begun_otherwise += 1
            self._warn(error.reason)
            raise

    def found_room(self) -> None:
        """An episode begins."""
        self._without_room.clear()

    def found_no_room(self, problem: Problem, seeds: EpisodeSeeds, told: str) -> None:
        """An episode cannot begin, for the reason `told`. Raises DataError where that is so for one
        group after the other."""
        self._without_room.add((problem.question, seeds.environment), told)
        self._warn(told)


class _Warnings:
    """Says why the first episodes cannot be scored."""

    def __init__(self) -> None:
        self._num_logged = 0

    def __call__(self, told: str) -> None:
        self._num_logged += 1
        if self._num_logged <= _MOST_LOGGED:
            logger.warning("an episode cannot be scored: %s", told)


class _WithoutRoom:
    """Counts groups whose episodes cannot begin."""

    def __init__(self) -> None:
        self._groups: set[tuple[str, int]] = set()
        """Question and seed of the last episodes, none of which could begin; a question that comes
        again is in another group."""

    def clear(self) -> None:
        """One could begin."""
        self._groups.clear()

    def add(self, group: tuple[str, int], told: str) -> None:
        """One of this group cannot begin, for the reason `told`. Raises DataError where too many
        groups in a row cannot."""
        self._groups.add(group)
        if len(self._groups) >= _MOST_WITHOUT_ROOM:
            raise DataError(
                f"the episodes of {len(self._groups)} groups in a row cannot begin; the last: "
                f"{told}",
                where="[rollout] max_model_len, [trainer] max_tokens_per_microbatch",
                remedy="raise them, or have the environment say less in front of the first turn",
            )


class _Episode:
    """One episode while it is played."""

    def __init__(
        self,
        player: EpisodePlayer,
        ask: Ask,
        environment: Environment,
        problem: Problem,
        seeds: EpisodeSeeds,
        limits: EpisodeLimits,
    ):
        self._player = player
        self._ask = ask
        self._environment = environment
        self._problem = problem
        self._seeds = seeds
        self._limits = limits
        self._ends_at = time.monotonic() + limits.seconds
        self._earlier: list[Completion] = []
        self._num_ended = 0
        """Tokens of the sequences in `earlier`, with what they answer."""
        self._num_used = 0
        """Tokens behind the first prompt."""
        self._num_turns = 0
        self._outcome = _UNSCORABLE
        self._finish_reason = "length"

    async def play(self) -> None:
        """Take turns until the environment or a limit ends the episode."""
        try:
            observation = await self._environment.reset(self._problem, self._seeds.environment)
            self._player.require_same_beginning(self._problem, self._seeds, observation)
        except Unscorable:
            self._finish_reason = "stop"  # no limit has ended it
            await self._sample_unscorable()
            return
        self._outcome = observation.outcome
        self._begin(observation)
        if self._room_behind(self._state, 0) < 1:
            self._finish_reason = "stop"
            self._outcome = _UNSCORABLE
            self._player.found_no_room(self._problem, self._seeds, self._told_length())
            await self._sample_unscorable()
            return
        self._player.found_room()
        try:
            while await self._take_turn():
                pass
        except Unscorable:
            self._finish_reason = "stop"
            self._outcome = _UNSCORABLE

    def completion(self) -> Completion:
        """Return the record of the episode."""
        last = self._sequence(self._finish_reason)
        return replace(
            last,
            earlier=tuple(self._earlier),
            outcome=self._outcome.reward,
            outcome_metrics=self._outcome.metrics,
        )

    def _begin(self, observation: Observation) -> None:
        self._tools = observation.tools
        self._turns = self._player.turn_tokens(observation.tools, observation.messages)
        of_recipe = conversation_of(self._problem.metadata)
        messages = self._turns.escaped(observation.messages, known=of_recipe)
        self._state = self._turns.begin(messages)
        self._builder = SequenceBuilder(self._state.token_ids)
        self._label = observation.state

    async def _take_turn(self) -> bool:
        """Sample a turn and have the environment reply; returns whether there is another one."""
        sampled = await self._sample(self._room())
        sampled_ids = sampled.token_ids.tolist()
        text = self._turns.reply_text(self._state, sampled_ids)
        read = self._player.read_reply(text, self._tools, self._num_turns)
        is_last = self._num_turns >= self._limits.max_turns  # no request follows
        if read.reply.tool_calls and not is_last:
            refusal = self._turns.refusal_of_calls(self._state, sampled_ids, read.message)
            if refusal is not None:  # told to the policy: the environment makes none of them
                read = with_refused_calls(text, refusal.message)
        step = await self._environment.step(read.reply)
        progress.advance()
        self._builder.judge_turn(step.reward, spoilt=step.spoilt)
        if step.outcome is not None:
            self._outcome = step.outcome
        if step.spoilt:
            self._outcome = _UNSCORABLE
            self._finish_reason = "stop"
            return False
        if step.done:
            self._finish_reason = sampled.finish_reason  # a limit may have cut the turn
            return False
        if is_last or time.monotonic() >= self._ends_at:
            return False
        following = self._following(sampled_ids, read.message, step)
        if following is None:
            self._finish_reason = sampled.finish_reason  # no other limit has ended it
            return False
        return self._goes_on(following, step)

    def _following(self, sampled_ids: Sequence[int], reply: Message, step: Step) -> NextTurn | None:
        """Return the next request; None where the chat template refuses the reply (there are some
        that take no empty one) and takes another in its place. Raises DataError where it takes
        none: that is not the policy's doing."""
        try:
            return self._turns.after(self._state, sampled_ids, reply, step.messages)
        except DataError:
            if reply.get("tool_calls"):  # the template takes them, or they had been left out
                raise
            other = {"role": "assistant", "content": "0"}
            refusal = self._turns.refusal(self._state, sampled_ids, other, step.messages)
            if refusal is not None:
                raise
            return None

    def _goes_on(self, following: NextTurn, step: Step) -> bool:
        """Take the tokens before the next turn, if there is room for one token behind them."""
        num_between = following.num_between
        num_ended = 0
        if following.restart is not None:
            num_ended = len(self._builder.token_ids)
        room = self._room_behind(following.state, num_between, num_ended)
        if room < 1:
            return False
        self._num_ended += num_ended
        if following.restart is not None:
            self._earlier.append(self._sequence("stop"))
            self._builder = SequenceBuilder(following.state.token_ids)
        else:
            self._builder.add_environment(following.between_ids)
        self._num_used += num_between
        self._state = following.state
        self._label = step.state
        return True

    async def _sample(self, room: int) -> Completion:
        sampled = await self._player.sample(
            self._ask,
            self._state.token_ids,
            max_tokens=room,
            seed=self._turn_seed(),
            routes_from=self._builder.routes_from,
            tools=self._tools,
        )
        self._builder.add_turn(sampled, self._label)
        self._num_used += sampled.num_tokens
        self._num_turns += 1
        return sampled

    def _room(self) -> int:
        """Return tokens that the next turn may have."""
        room = self._room_behind(self._state, 0)
        if self._limits.turn_tokens is not None:
            room = min(room, self._limits.turn_tokens)
        return room

    def _told_length(self) -> str:
        """Return why no token fits behind the first request."""
        told = f"its first request has {len(self._state.token_ids)} tokens"
        most = self._limits.max_sequence
        if most == self._limits.max_model_len:
            return f"{told}, and the engine takes {most} with the reply (max_model_len)"
        return f"{told}, and {most} can be trained at once (trainer.max_tokens_per_microbatch)"

    def _room_behind(self, state: TurnState, num_between: int, num_ended: int = 0) -> int:
        """num_ended: tokens of a sequence that ends before this request."""
        limits = self._limits
        left = min(
            limits.episode_tokens - self._num_used - num_between,
            limits.max_model_len - len(state.token_ids),
        )
        if limits.recorded_tokens is not None:
            num_ended += self._num_ended
            left = min(left, limits.recorded_tokens - num_ended - len(state.token_ids))
        return left

    def _sequence(self, finish_reason: str) -> Completion:
        return self._player.sequence(self._builder, finish_reason)

    async def _sample_unscorable(self) -> None:
        self._builder = await self._player.stand_in(
            self._ask, self._problem, self._turn_seed(), self._limits
        )

    def _turn_seed(self) -> int | None:
        """Return the seed of the next turn; None where sampling has no seeds."""
        if self._seeds.turns is None:
            return None
        return derive_seed(self._seeds.turns, "turn", self._num_turns)
