"""An episode that a program drives: it sends conversations, and gets the policy's next reply.

The program keeps conversations as messages, as clients of OpenAI's API do. Here they are kept as
ids. A request that goes on from a known conversation continues its ids (`data.turn_tokens`). One
that forks a conversation, or whose history the program has edited, begins a sequence of its own:
only what is sampled then is trained in it.

    system, question                    -> reply 1            sequence 1
    system, question, reply 1, result   -> reply 2            sequence 1, continued
    system, question, reply 1, hint     -> reply 3            sequence 2, a fork behind reply 1
    system, summary                     -> reply 4            sequence 3"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.reply_forms import num_before_reply
from grpo_megatron.data.turn_tokens import NextTurn, TurnState, TurnTokens
from grpo_megatron.environments.protocol import ToolSchema
from grpo_megatron.rollout.chat_messages import comparable, sent_message
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.sequence_builder import SequenceBuilder
from grpo_megatron.rollout.stop_strings import first_stop, first_tokens, num_tokens_to_stop
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler
from grpo_megatron.types import Completion

_MOST_KNOWN = 1024
"""Conversations of one session that may be continued; the oldest are forgotten."""


class EpisodeOver(Exception):
    """A limit of the episode leaves no room for another turn; the text says which."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A turn of the policy, as the program gets it."""

    message: Message
    finish_reason: str
    """"stop", "length" or "tool_calls", as OpenAI's API has them."""
    num_prompt_tokens: int
    num_tokens: int


@dataclass(eq=False, slots=True)
class _Conversation:
    """One that the program may go on with: it ends with a reply of the policy."""

    messages: list[str]
    """As the program knows them, with the reply; see `comparable`."""
    state: TurnState
    """Of the request that the reply answers."""
    sampled_ids: list[int]
    reply: Message
    """As the chat template gets it."""
    builder: SequenceBuilder
    num_tokens: int
    """Of the builder's response up to the reply."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A turn that is to be sampled."""

    turns: TurnTokens
    state: TurnState
    builder: SequenceBuilder
    between_ids: Sequence[int]
    """Come into the sequence before the turn."""
    num_between: int
    """Tokens that the program has said behind the turn before, also where they begin a sequence."""
    num_before: int
    """Tokens that come into the record before the turn: those between, or the whole request of a
    new sequence."""
    num_allowed: int
    """Tokens that the turn may have, counted as used until it ends."""
    is_cut_by_program: bool
    """Whether the program, and no limit of the episode, allows no more."""
    turn: int
    seed: int | None


class ConversationSession:
    """The sequences of one episode, while a program asks for turns.

    Requests are served side by side as far as the episode's tokens allow it: each counts all tokens
    that it may have as used until it ends, and others wait for what it leaves."""

    def __init__(
        self, ask: Ask, sampler: TurnSampler, limits: EpisodeLimits, seed: int | None = None
    ):
        self._ask = ask
        self._sampler = sampler
        self._limits = limits
        self._seed = seed
        self._began = time.monotonic()
        self._known: list[_Conversation] = []
        self._builders: list[SequenceBuilder] = []
        """Of all sequences, in the order in which each was continued last."""
        self._claimed: set[SequenceBuilder] = set()
        """Those that a request is continuing now."""
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._num_running = 0
        self._num_used = 0
        """Tokens behind first prompts, with those that running requests may have."""
        self._num_recorded = 0
        """Tokens of all sequences with what they answer, counted in the same way."""
        self._is_closed = False
        self._freed = asyncio.Event()
        self.num_turns = 0
        """Asked for; of those that were refused none."""
        self._refused_at: int | None = None
        """How many turns had been asked for when a limit of turns or tokens has refused one; None:
        none was refused, or a turn that was asked for later has ended."""
        self._was_cut = False
        """Whether such a limit has cut the turn that ended last."""

    @property
    def is_limited(self) -> bool:
        """Whether a limit of turns or tokens has refused a turn, and none was taken behind that,
        or has cut the last one. A program that is refused a history may go on with a shorter
        one."""
        return self._refused_at is not None or self._was_cut

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
    ) -> ChatReply:
        """Sample the reply to a conversation (`plain_messages`), of at most `max_tokens`. It ends
        with the token that completes one of `stops`, which the program does not get.

        EpisodeOver where a limit is reached; DataError where the chat template refuses the
        conversation or the tools; and what the engine raises."""
        request = self._prepared(messages, tools, max_tokens)
        while request is None:
            await self._freed.wait()
            request = self._prepared(messages, tools, max_tokens)
        self._claim(request)
        sampled = None
        try:
            sampled = await self._sampler.sample(
                self._ask,
                request.state.token_ids,
                max_tokens=request.num_allowed,
                seed=request.seed,
                routes_from=request.builder.routes_from,
                tools=tools,
            )
            sampled = _stopped(request, sampled, stops)
        finally:
            self._release(request, sampled)
        if self._is_closed:
            raise EpisodeOver("the episode has ended")
        return self._answered(request, sampled, messages, tools, stops)

    def close(self) -> None:
        """Take no further turn, not even one that is being sampled."""
        self._is_closed = True
        self._wake()

    def completion(self, outcome: float, *, is_spoilt: bool = False) -> Completion | None:
        """Return the record of the episode, with the sequence that was continued last as its last
        one; None where no turn was sampled. Closes the session.

        is_spoilt: the program has failed, so that nothing can be said about the episode."""
        self.close()
        if not self._builders:
            return None
        if is_spoilt:
            self._builders[-1].judge_turn(math.nan, spoilt=True)
        finish_reason = "stop"
        if self.is_limited:
            finish_reason = "length"
        earlier = [self._sampler.sequence(builder, "stop") for builder in self._builders[:-1]]
        last = self._sampler.sequence(self._builders[-1], finish_reason)
        return replace(last, earlier=tuple(earlier), outcome=outcome)

    def _prepared(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], max_tokens: int | None
    ) -> _Request | None:
        """Return what is to be sampled; None while other requests may have all tokens that are
        left."""
        self._require_turns_and_time()
        turns = self._sampler.turn_tokens(tools, messages[: num_before_reply(messages)])
        known = self._longest_known(messages)
        if known is None:
            state = self._begun(turns, messages)
            builder = SequenceBuilder(state.token_ids)
            between: Sequence[int] = ()
            num_between = 0
        else:
            following = self._following(turns, known, messages)
            state = following.state
            num_between = following.num_between
            if following.restart is None and self._is_end(known):
                builder = known.builder
                between = following.between_ids
            else:
                builder = SequenceBuilder(state.token_ids)
                between = ()
        num_before = len(between)
        if known is None or builder is not known.builder:
            num_before = len(state.token_ids)
        self._require_context(state)
        left = self._tokens_left(state, num_between, num_before)
        if left < 1:
            if self._num_running:
                return None
            raise self._refusal(self._told_tokens(num_between))
        if self._limits.turn_tokens is not None:
            left = min(left, self._limits.turn_tokens)
        is_cut_by_program = max_tokens is not None and max_tokens <= left
        if max_tokens is not None:
            left = min(left, max_tokens)
        return _Request(
            turns=turns,
            state=state,
            builder=builder,
            between_ids=between,
            num_between=num_between,
            num_before=num_before,
            num_allowed=left,
            is_cut_by_program=is_cut_by_program,
            turn=self.num_turns,
            seed=self._seed_of(state.token_ids),
        )

    def _require_turns_and_time(self) -> None:
        limits = self._limits
        if self._is_closed:
            raise EpisodeOver("the episode has ended")
        if self.num_turns >= limits.max_turns:
            raise self._refusal(f"the episode has had its {limits.max_turns} turns (max_turns)")
        if time.monotonic() - self._began >= limits.seconds:
            raise EpisodeOver(f"the episode has had its {limits.seconds:g} seconds (episode_s)")

    def _require_context(self, state: TurnState) -> None:
        """Raise EpisodeOver where the engine takes no token behind this conversation."""
        if len(state.token_ids) >= self._limits.max_model_len:
            raise self._refusal(
                f"the conversation has {len(state.token_ids)} tokens, and the engine takes "
                f"{self._limits.max_model_len} with the reply (max_model_len)"
            )

    def _refusal(self, told: str) -> EpisodeOver:
        """Return the refusal of a turn for a limit of turns or tokens, which is remembered."""
        self._refused_at = self.num_turns
        return EpisodeOver(told)

    def _tokens_left(self, state: TurnState, num_between: int, num_before: int) -> int:
        """Return how many tokens the next turn may have, after the given numbers in the episode and
        in the record."""
        limits = self._limits
        left = min(
            limits.max_model_len - len(state.token_ids),
            limits.episode_tokens - self._num_used - num_between,
        )
        if limits.recorded_tokens is not None:
            left = min(left, limits.recorded_tokens - self._num_recorded - num_before)
        return left

    def _told_tokens(self, num_between: int) -> str:
        """Return which tokens have been used up."""
        limits = self._limits
        if self._num_used + num_between >= limits.episode_tokens:
            return f"the episode has had its {limits.episode_tokens} tokens (episode_tokens)"
        return (
            f"the conversations of the episode have together the {limits.recorded_tokens} tokens "
            "that can be trained at once (trainer.max_tokens_per_microbatch)"
        )

    def _longest_known(self, messages: Sequence[Message]) -> _Conversation | None:
        """Return the longest conversation that `messages` continue, among equal ones one that
        nothing has continued yet; None: they begin a new one. With other tools the template writes
        another text, which makes it a restart."""
        asked = [comparable(message) for message in messages]
        best = None
        best_rank = (0, False)
        for found in self._known:
            length = len(found.messages)
            rank = (length, self._is_end(found))
            if rank > best_rank and asked[:length] == found.messages:
                best = found
                best_rank = rank
        return best

    def _is_end(self, known: _Conversation) -> bool:
        """Whether nothing has gone on from it, and nothing does now."""
        return known.builder.num_tokens == known.num_tokens and known.builder not in self._claimed

    def _begun(self, turns: TurnTokens, messages: Sequence[Message]) -> TurnState:
        """Return the first request of a conversation."""
        return turns.begin(turns.escaped(messages, known=self._given(messages)))

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Return those of the messages that are replies of the policy in this session. Markers of
        all others are text; the policy's thoughts and calls stay what they are."""
        given = {known.messages[-1] for known in self._known}
        found = []
        for message in messages:
            if message["role"] == "assistant" and comparable(message) in given:
                found.append(message)
        return found

    def _following(
        self, turns: TurnTokens, known: _Conversation, messages: Sequence[Message]
    ) -> NextTurn:
        """Return the request behind a known conversation, which `messages` go on from."""
        new_messages = messages[len(known.messages) :]
        return turns.after(
            known.state, known.sampled_ids, known.reply, new_messages, self._given(new_messages)
        )

    def _seed_of(self, token_ids: tuple[int, ...]) -> int | None:
        """Depends on what is asked, and not on when: requests may come side by side."""
        if self._seed is None:
            return None
        asked = " ".join(map(str, token_ids))
        return derive_seed(self._seed, "turn", asked, self._asked[token_ids])

    def _claim(self, request: _Request) -> None:
        self._asked[request.state.token_ids] += 1
        self._claimed.add(request.builder)
        self._num_running += 1
        self._num_used += request.num_between + request.num_allowed
        self._num_recorded += request.num_before + request.num_allowed
        self.num_turns += 1

    def _release(self, request: _Request, sampled: Completion | None) -> None:
        """Give back what the turn has left, and take it into its sequence. Of a turn that failed,
        or ended behind the end of the session, nothing stays."""
        self._wake()
        self._claimed.discard(request.builder)
        self._num_running -= 1
        self._num_used -= request.num_allowed
        self._num_recorded -= request.num_allowed
        if sampled is None or self._is_closed:
            self._num_used -= request.num_between
            self._num_recorded -= request.num_before
            return
        self._num_used += sampled.num_tokens
        self._num_recorded += sampled.num_tokens
        builder = request.builder
        if request.between_ids:
            builder.add_environment(request.between_ids)
        builder.add_turn(sampled, "")
        if builder in self._builders:
            self._builders.remove(builder)
        self._builders.append(builder)
        if self._refused_at is not None and request.turn >= self._refused_at:
            self._refused_at = None
        self._was_cut = sampled.truncated and not request.is_cut_by_program

    def _wake(self) -> None:
        """Have waiting requests look again, once this task waits."""
        self._freed.set()
        self._freed = asyncio.Event()

    def _answered(
        self,
        request: _Request,
        sampled: Completion,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        stops: Sequence[str],
    ) -> ChatReply:
        sampled_ids = sampled.token_ids.tolist()
        text = request.turns.reply_text(request.state, sampled_ids)
        opening = request.turns.reply_text(request.state, ())
        place = first_stop(text[len(opening) :], stops)
        seen = text
        if place is not None:
            seen = text[: len(opening) + place]
        reply = self._sampler.read_reply(seen, tools, request.turn).message
        sent = sent_message(reply)
        if not reply.get("tool_calls"):  # the template is given what was sampled, the stop with it
            reply = {**reply, "content": text}
        known = _Conversation(
            [comparable(message) for message in [*messages, sent]],
            request.state,
            sampled_ids,
            reply,
            request.builder,
            request.builder.num_tokens,
        )
        self._known.append(known)
        del self._known[:-_MOST_KNOWN]
        finish_reason = sampled.finish_reason
        if reply.get("tool_calls"):
            finish_reason = "tool_calls"
        num_prompt_tokens = len(request.state.token_ids)
        return ChatReply(sent, finish_reason, num_prompt_tokens, sampled.num_tokens)


def _stopped(request: _Request, sampled: Completion, stops: Sequence[str]) -> Completion:
    """Return the turn up to the first of `stops`."""
    if not stops:
        return sampled
    ids = sampled.token_ids.tolist()
    opening = request.turns.reply_text(request.state, ())

    def text_of(num_tokens: int) -> str:
        text = request.turns.reply_text(request.state, ids[:num_tokens])
        return text.removeprefix(opening)

    num_tokens = num_tokens_to_stop(text_of, len(ids), stops)
    if num_tokens is None:
        return sampled
    return first_tokens(sampled, num_tokens, len(request.state.token_ids))
