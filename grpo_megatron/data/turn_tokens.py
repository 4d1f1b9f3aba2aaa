"""Token identity over turns: token in, token out.

What the engine sampled is never decoded and encoded again. The next request is an *extension*: the
ids of the last one, the sampled ids, and the ids of what the template writes in between.

    last request   <|im_start|>user 2+3?<|im_end|> <|im_start|>assistant
    sampled        5<|im_end|>
    in between     <|im_start|>user And plus 1?<|im_end|> <|im_start|>assistant

Where the template rewrites what was there (it drops a thought, strips a space, writes a call's
JSON in its own way) the next request is a *restart*: the template's ids of the whole conversation,
behind the longest part of the real ids that the template leaves as it is. `turn_proof.prove` holds
both against the tokenizer's ids of the whole text, before anything is sampled."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, Literal, NamedTuple

from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.conversation import Message, opening_of
from grpo_megatron.data.environment_text import cleaned, cut
from grpo_megatron.data.markers import EncodedText, Markers, Seam
from grpo_megatron.data.reply_forms import (
    REASONING,
    argument_forms,
    reply_forms,
    said_by_user,
    with_call_ids,
)
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError

RestartKind = Literal["earlier text", "reply", "end of turn", "seam"]
"""What the template changed: text of an earlier turn, the reply, the token that ended it; or the
tokenizer would join the reply and what follows."""


@dataclass(frozen=True, slots=True)
class TurnState:
    """A request of an episode. `messages` are as the template was given them; `text` is what it
    wrote, with markers of the environment escaped."""

    token_ids: tuple[int, ...]  # of the whole request
    text: str
    seams: tuple[Seam, ...]
    messages: tuple[Message, ...]
    turn: int  # how many replies the conversation has


@dataclass(frozen=True, slots=True)
class Restart:
    """Why the next request does not continue the last one."""

    kind: RestartKind
    turn: int  # of the reply that the template rewrote, from 1
    num_kept: int  # ids at the beginning that both sequences have
    reason: str  # template, turn, and both texts where they part
    num_said: int  # tokens that came in behind the reply


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The next request. An extension is `last ids + sampled ids + between_ids`; a restart has new
    ids and no `between_ids`."""

    state: TurnState
    between_ids: tuple[int, ...]
    restart: Restart | None = None

    @property
    def num_between(self) -> int:
        """Tokens that count as said between the turns: `between_ids`, or as many as a restart
        has of them. They are not told apart there from what the template has rewritten: what the
        request is longer by, and no less than what was said, is taken."""
        if self.restart is None:
            return len(self.between_ids)
        return self.restart.num_said


class _Sampled(NamedTuple):
    """A reply. `text` and `seams` are without the token that ended it."""

    token_ids: tuple[int, ...]
    text: str
    seams: tuple[Seam, ...]
    spelled: frozenset[str]
    end_id: int | None  # None: cut by length, or by a stop string
    end_text: str


class _Rendered(NamedTuple):
    """A conversation, and its text by the template."""

    messages: tuple[Message, ...]
    text: str


class TurnTokens:
    """Requests of the turns of an episode, for one template; holds no state of any episode.

    `assistant_prefix` is what the recipe puts behind the generation prompt; of what the environment
    says, at most `observation_characters` a message are kept. DataError from every
    method where the template refuses the conversation, or the tokenizer lacks a character."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        *,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        day: date | None = None,
        assistant_prefix: str = "",
        observation_characters: int | None = None,
    ):
        self.template = template
        self.tools = tuple(tools or ())
        self.markers = Markers(tokenizer)
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        if self.tools:
            self._arguments["tools"] = list(self.tools)
        self._day = day
        self._observation_characters = observation_characters
        self.assistant_prefix = assistant_prefix
        self._splits_thoughts = template.mentions(REASONING)

    def begin(self, messages: Sequence[Message], *, from_environment: bool = False) -> TurnState:
        """Return the first request: system message, tools, question, beginning of the reply. Its
        ids are those of transformers' `apply_chat_template` with `add_generation_prompt`.

        Messages of a data set are the recipe's own: markers in them are markers, as in prompts of
        one turn, and calls are written as they are, in another form only where the template
        refuses that. In those `from_environment` markers are text."""
        if from_environment:
            messages = self.escaped(messages)
        rendered = next(self._rendered(argument_forms(messages), turn=1))
        encoded = self.encode(rendered.text, turn=1)
        return TurnState(encoded.token_ids, rendered.text, encoded.seams, rendered.messages, 0)

    def reply_text(self, state: TurnState, sampled_ids: Sequence[int]) -> str:
        """Return the reply as text, with what the request had opened and without the token that
        ended it; for the environment, for parsers, and as `content` of the reply's message."""
        ids, _ = self._without_end(sampled_ids)
        return opening_of(state.text, self.assistant_prefix) + self.markers.text_of(ids)

    def after(
        self,
        state: TurnState,
        sampled_ids: Sequence[int],
        reply: Message,
        new_messages: Sequence[Message],
        known: Sequence[Message] = (),
    ) -> NextTurn:
        """Return the request behind `state`, to which the policy answered `sampled_ids` and then
        the environment `new_messages`. Those of them that are equal to one of `known` are the
        policy's own and no text (`escaped`).

        `reply` is the answer as a message: `content` of `reply_text`, or with calls parsed
        (`content` is then the text in front of them, `tool_calls` as in OpenAI's API, arguments as
        JSON text or as a table). Whether it was cut by length shows in the ids: they then end
        without a token that ends a turn. Markers in `new_messages` become text. What a tool says
        about a call that could not be read comes from the user where the template wants a call."""
        turn = state.turn + 1
        sampled = self._sampled(sampled_ids)
        with self._named(turn):
            new_messages = with_call_ids(self.escaped(new_messages, known), reply)
            forms = self.forms(reply)
        if not reply.get("tool_calls") and self._results_want_calls:
            new_messages = said_by_user(new_messages)
        all_rendered = self._render_forms(state, sampled, forms, new_messages)
        seen = state.text + sampled.text
        for rendered in all_rendered:
            if rendered.text.startswith(seen):
                extension = self._extension(state, sampled, rendered, turn)
                if extension is not None:
                    return extension
        num_said = 0
        for message in new_messages:
            num_said += len(self.encode(message["content"], turn=turn).token_ids)
        return self._restart(state, sampled, all_rendered[0], turn, num_said)

    def refusal_of_calls(
        self, state: TurnState, sampled_ids: Sequence[int], reply: Message
    ) -> DataError | None:
        """Return why there is no request behind `reply`, as of `after`, once each of its calls has
        a result; None: there is one. What the policy calls is not known before it is sampled, and
        templates refuse some of it: several calls in one turn, ids of another length."""
        results: list[Message] = []
        for call in reply.get("tool_calls") or ():
            results.append({"role": "tool", "name": call["function"]["name"], "content": "0"})
        return self.refusal(state, sampled_ids, reply, results)

    def refusal(
        self,
        state: TurnState,
        sampled_ids: Sequence[int],
        reply: Message,
        new_messages: Sequence[Message],
    ) -> DataError | None:
        """Return why there is no request behind `reply` and `new_messages`, as of `after`; None:
        there is one."""
        try:
            self.after(state, sampled_ids, reply, new_messages)
        except DataError as error:
            return error
        return None

    def forms(self, reply: Message) -> list[Message]:
        """Return the reply as the template may want it, in the order in which forms are tried."""
        return reply_forms(reply, splits_thoughts=self._splits_thoughts)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self._tokenizer.stop_token_ids

    def escaped(self, messages: Sequence[Message], known: Sequence[Message] = ()) -> list[Message]:
        """Return messages of the environment as text and nothing else: cut, cleaned
        (`environment_text`), with a question mark for what the tokenizer cannot write, and with
        every marker in any text of them escaped. Those that are equal to one of `known`, which is
        the recipe's or the policy's, stay as they are. Raises DataError where one has no role or no
        text."""
        changed = []
        for message in messages:
            if message in known:
                changed.append(message)
                continue
            for field in ("role", "content"):
                if not isinstance(message.get(field), str):
                    raise DataError(
                        f"a message of the environment has no {field}: {', '.join(message)}",
                        where=self.template.where,
                        remedy='a message is {"role": "user" or "tool", "content": "…"}',
                    )
            content = cut(message["content"], self._observation_characters)
            changed.append(_changed_texts({**message, "content": content}, self._as_text))
        return changed

    @cached_property
    def _results_want_calls(self) -> bool:
        """Whether the template refuses a result of a tool behind a reply without calls, or the
        reply behind that."""
        answer = {"role": "assistant", "content": "2"}
        result = with_call_ids([{"role": "tool", "content": "3", "name": "f"}], answer)
        conversation = [{"role": "user", "content": "1"}, answer, *result, answer, *result]
        try:
            self.render(conversation, turn=2)
        except DataError:
            return True
        return False

    def _as_text(self, text: str) -> str:
        return self.markers.escape(self._tokenizer.writable(cleaned(text)))

    def render(self, messages: Sequence[Message], *, turn: int) -> str:
        """Return the template's text of a conversation up to the beginning of the next reply."""
        with self._named(turn):
            text = self.template.render(messages, self._arguments, day=self._day)
        return text + self.assistant_prefix

    def encode(self, text: str, *, turn: int) -> EncodedText:
        """Return the ids of a text that the template wrote."""
        return self.markers.encode(text, where=f"{self.template.where}, turn {turn}")

    def _without_end(self, sampled_ids: Sequence[int]) -> tuple[Sequence[int], int | None]:
        if not sampled_ids or sampled_ids[-1] not in self.stop_token_ids:
            return sampled_ids, None
        return sampled_ids[:-1], int(sampled_ids[-1])

    def _sampled(self, sampled_ids: Sequence[int]) -> _Sampled:
        token_ids = tuple(int(token_id) for token_id in sampled_ids)
        ids, end_id = self._without_end(token_ids)
        text, seams, spelled = self.markers.decode(ids)
        end_text = ""
        if end_id is not None:
            end_text = self.markers.text_of([end_id])
        return _Sampled(token_ids, text, seams, spelled, end_id, end_text)

    def _render_forms(
        self,
        state: TurnState,
        sampled: _Sampled,
        forms: Sequence[Message],
        new_messages: Sequence[Message],
    ) -> list[_Rendered]:
        """Render every form of the reply that the template takes. Raises DataError where it takes
        none."""
        conversations = []
        for following in argument_forms(new_messages):
            for form in forms:
                if sampled.spelled:
                    form = _changed_texts(
                        form, lambda text: self.markers.escape_these(text, sampled.spelled)
                    )
                conversations.append([*state.messages, form, *following])
        return list(self._rendered(conversations, turn=state.turn + 1))

    def _rendered(
        self, conversations: Sequence[Sequence[Message]], *, turn: int
    ) -> Iterator[_Rendered]:
        """Render one after the other the conversations that the template takes. Raises DataError
        where it takes none."""
        refusal = None
        is_taken = False
        for messages in conversations:
            try:
                text = self.render(messages, turn=turn)
            except DataError as error:
                refusal = refusal or error
                continue
            is_taken = True
            yield _Rendered(tuple(messages), text)
        if not is_taken:
            assert refusal is not None  # a conversation has at least one form
            raise refusal

    def _extension(
        self, state: TurnState, sampled: _Sampled, rendered: _Rendered, turn: int
    ) -> NextTurn | None:
        """None where the turn ended with another token than the template writes, or where the
        tokenizer would join the reply and what follows."""
        place = len(state.text) + len(sampled.text)
        rest = rendered.text[place:]
        if not rest.startswith(sampled.end_text):
            return None
        encoded = self.encode(rest, turn=turn)
        num_sampled_of_rest = int(sampled.end_id is not None)
        if sampled.end_id is not None and encoded.token_ids[0] != sampled.end_id:
            return None
        seams = _all_seams(state, sampled)
        if not self.markers.begins_with_marker(rest, 0):
            begin = 0
            if seams:
                begin = seams[-1].character
            before = self.encode(rendered.text[begin:place], turn=turn).token_ids
            whole = self.encode(rendered.text[begin:], turn=turn).token_ids
            if whole != before + encoded.token_ids:
                return None
        between_ids = encoded.token_ids[num_sampled_of_rest:]
        first = len(state.token_ids) + len(sampled.token_ids) - num_sampled_of_rest
        seams += _moved(encoded.seams, place, first)
        state = TurnState(
            state.token_ids + sampled.token_ids + between_ids,
            rendered.text,
            seams,
            rendered.messages,
            turn,
        )
        return NextTurn(state, between_ids)

    def _restart(
        self,
        state: TurnState,
        sampled: _Sampled,
        rendered: _Rendered,
        turn: int,
        num_said: int,
    ) -> NextTurn:
        """Return the template's ids behind the last seam up to which it leaves the real text as it
        is. num_said: tokens of the messages behind the reply, without what is around them."""
        known_ids = state.token_ids + sampled.token_ids
        known_text = state.text + sampled.text + sampled.end_text
        seams = _all_seams(state, sampled)
        if sampled.end_id is not None:
            place = len(state.text) + len(sampled.text)
            seams += (Seam(place, len(known_ids) - 1),)
        parting = _common_length(known_text, rendered.text)
        parting = self.markers.beginning_of(known_text, parting, seams)
        num_seams = self._num_kept_seams(seams, rendered.text, parting)
        kept = Seam(0, 0)
        if num_seams:
            kept = seams[num_seams - 1]
        encoded = self.encode(rendered.text[kept.character :], turn=turn)
        token_ids = known_ids[: kept.token] + encoded.token_ids
        seams_before = seams[: max(0, num_seams - 1)]
        new_state = TurnState(
            token_ids,
            rendered.text,
            seams_before + _moved(encoded.seams, kept.character, kept.token),
            rendered.messages,
            turn,
        )
        reason = (
            f"{self.template.where}, turn {turn}: the template writes "
            f"{_excerpt(rendered.text, parting)} where the engine saw "
            f"{_excerpt(known_text, parting)}"
        )
        kind = self._kind(state, sampled, parting)
        num_kept = _common_length(known_ids, token_ids)
        num_said = max(num_said, len(token_ids) - len(known_ids))
        return NextTurn(new_state, (), Restart(kind, turn, num_kept, reason, num_said))

    def _num_kept_seams(self, seams: Sequence[Seam], text: str, parting: int) -> int:
        """Return how many seams are also seams of a text that is the same up to `parting`."""
        for number in range(len(seams), 0, -1):
            place = seams[number - 1].character
            if place <= parting and self.markers.begins_with_marker(text, place):
                return number
        return 0

    def _kind(self, state: TurnState, sampled: _Sampled, parting: int) -> RestartKind:
        if parting < len(state.text):
            return "earlier text"
        if parting < len(state.text) + len(sampled.text):
            return "reply"
        if parting < len(state.text) + len(sampled.text) + len(sampled.end_text):
            return "end of turn"
        return "seam"

    @contextmanager
    def _named(self, turn: int) -> Iterator[None]:
        """Add the turn to what the template refuses."""
        try:
            yield
        except DataError as error:
            error.where = f"{error.where or self.template.where}, turn {turn}"
            raise


def _all_seams(state: TurnState, sampled: _Sampled) -> tuple[Seam, ...]:
    """Return the seams of the request and of the reply to it."""
    return state.seams + _moved(sampled.seams, len(state.text), len(state.token_ids))


def _moved(seams: Sequence[Seam], num_characters: int, num_tokens: int) -> tuple[Seam, ...]:
    moved = []
    for seam in seams:
        moved.append(Seam(seam.character + num_characters, seam.token + num_tokens))
    return tuple(moved)


def _changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a message with `change` of every text in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _changed_texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_changed_texts(item, change) for item in value]
    return value


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items both have at their beginning."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _excerpt(text: str, place: int) -> str:
    if place >= len(text):
        return "the end"
    return repr(text[place : place + 40])
