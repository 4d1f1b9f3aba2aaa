"""What the episodes of a domain share, whoever drives them: turns as tokens, sampled and read."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.turn_proof import prove
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.environments.protocol import ToolSchema
from grpo_megatron.environments.tools import first_messages
from grpo_megatron.errors import DataError
from grpo_megatron.rollout.segments import Ask, complete
from grpo_megatron.rollout.sequence_builder import SequenceBuilder
from grpo_megatron.rollout.tool_parsers import ReadReply
from grpo_megatron.types import Completion, Problem

ReplyReading = Callable[[str, Sequence[ToolSchema], int], ReadReply]
"""(text of a turn, tools, its number) -> what it says to the environment and the template."""

_MOST_TOOL_SETS = 64
"""Whose turns are kept: a program may change its tools in every request."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Where an episode ends that its environment, or its program, does not end."""

    max_turns: int
    turn_tokens: int | None
    """Of one turn; None: all that are left."""
    episode_tokens: int
    """Behind the first prompt, the environment's included."""
    max_model_len: int
    """Prompt and response of one request."""
    seconds: float
    recorded_tokens: int | None = None
    """Of all sequences together, with what they answer: a micro-batch must hold them. None: no
    matter."""

    @property
    def max_sequence(self) -> int:
        """Tokens of one sequence at most, with what it answers."""
        if self.recorded_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, self.recorded_tokens)


async def load_nothing(_: Sequence[ToolSchema]) -> None:
    """What needs no parsers is ready."""


class TurnSampler:
    """Samples the turns of one domain's episodes; holds no state of any of them.

    turn_tokens: of the domain's template with these tools; read_reply: see `ReplyReading`;
    load_reading: readies it for replies with these tools; decode: token ids to text."""

    def __init__(
        self,
        *,
        turn_tokens: Callable[[Sequence[ToolSchema]], TurnTokens],
        read_reply: ReplyReading,
        load_reading: Callable[[Sequence[ToolSchema]], Awaitable[None]] = load_nothing,
        decode: Callable[[Sequence[int]], str],
        segment_tokens: int | None = None,
    ):
        self.read_reply = read_reply
        self.decode = decode
        self._load_reading = load_reading
        self._segment_tokens = segment_tokens
        self._make_turn_tokens = turn_tokens
        self._turn_tokens: dict[str, TurnTokens] = {}

    def turn_tokens(self, tools: Sequence[ToolSchema], opening: Sequence[Message]) -> TurnTokens:
        """Return the domain's turns with these tools, which are proved once: behind any question,
        or, for a template that wants more or writes no tools, behind `opening`, the conversation in
        front of the first reply. Raises DataError where they cannot be."""
        key = json.dumps(list(tools), sort_keys=True)
        found = self._turn_tokens.pop(key, None)
        if found is None:
            found = self._make_turn_tokens(tools)
            _prove(found, opening)
        self._turn_tokens[key] = found  # behind all others: it was used last
        if len(self._turn_tokens) > _MOST_TOOL_SETS:
            del self._turn_tokens[next(iter(self._turn_tokens))]
        return found

    async def sample(
        self,
        ask: Ask,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        seed: int | None,
        routes_from: int,
        tools: Sequence[ToolSchema] = (),
    ) -> Completion:
        """Return one turn behind `token_ids`; while it is sampled, what reads replies with `tools`
        is loaded. Raises what `ask` raises, and what is wrong with the format of calls."""
        loading = asyncio.ensure_future(self._load_reading(tools))
        try:
            (sampled,) = await complete(
                ask,
                token_ids,
                n=1,
                max_tokens=max_tokens,
                seed=seed,
                segment_tokens=self._segment_tokens,
                routes_from=routes_from,
            )
            await loading
        finally:
            loading.cancel()
        return sampled

    async def stand_in(
        self, ask: Ask, problem: Problem, seed: int | None, limits: EpisodeLimits
    ) -> SequenceBuilder:
        """Return a sequence of one token behind the problem's conversation, or behind as much of it
        as fits, for an episode that had no turn: it has neither reward nor loss. Errors as of
        `turn_tokens` and `sample`."""
        asked = first_messages(problem)
        state = self.turn_tokens((), asked).begin(asked, from_environment=True)
        token_ids = state.token_ids[: limits.max_sequence - 1]
        builder = SequenceBuilder(token_ids)
        sampled = await self.sample(ask, token_ids, max_tokens=1, seed=seed, routes_from=0)
        builder.add_turn(sampled, "")
        builder.judge_turn(math.nan, spoilt=True)
        return builder

    def sequence(self, builder: SequenceBuilder, finish_reason: str) -> Completion:
        """Return the record of a sequence of an episode, with the text of its last turn and the ids
        that it answers."""
        found = builder.completion(finish_reason)
        answer_ids = found.token_ids[found.answer_start :]
        return replace(
            found,
            text=self.decode(answer_ids.tolist()),
            answered_ids=builder.prompt_ids,
        )


def _prove(turns: TurnTokens, opening: Sequence[Message]) -> None:
    """Raise DataError where the template proves neither with a question nor with `opening`."""
    try:
        prove(turns)
    except DataError:
        if not opening:
            raise
        prove(turns, turns.escaped(opening))
