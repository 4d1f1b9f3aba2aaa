"""Proof, before anything is sampled, that requests of later turns have the ids of the template.

Conversations that stand for all others go through `TurnTokens` with replies as the policy would
write them. Every request is compared with the tokenizer's ids of the whole text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_megatron.data.conversation import Message, opening_of
from grpo_megatron.data.reply_forms import with_call_ids
from grpo_megatron.data.turn_tokens import NextTurn, Restart, TurnState, TurnTokens
from grpo_megatron.errors import DataError

_QUESTION = {"role": "user", "content": "1 1"}
_ANSWER = "141421"
_THOUGHT = "271828"
_SAID = "314159"
"""What the environment says. Digits: alphabets of tiny models have them."""
_NUM_TURNS = 2


class Transition(NamedTuple):
    """What follows a reply of one kind."""

    reply: str  # "answer", "thought", "call", "thought and call"
    follows: str  # role of the message behind it
    cut: bool  # whether the reply was cut by length
    restart: Restart | None  # None: an extension


class Proof(NamedTuple):
    """What was proved: the transitions that the template knows, and those it refuses, with why."""

    transitions: tuple[Transition, ...]
    refused: tuple[str, ...]

    @property
    def restarts(self) -> tuple[Transition, ...]:
        """Transitions after which an episode goes on as a new sequence."""
        return tuple(step for step in self.transitions if step.restart is not None)


def prove(tokens: TurnTokens, opening: Sequence[Message] = (_QUESTION,)) -> Proof:
    """Go through two turns of every kind behind `opening`, a first conversation of the run, whose
    system messages may describe tools where the template does not.

    Raises DataError where an id differs from the template's, where the template drops what the
    user, a tool or the policy says, or the tools; and where it refuses a user's message behind an
    answer, or with tools a result behind a call."""
    begin = tokens.begin(opening)
    _require_tools(tokens, opening)
    transitions: list[Transition] = []
    refused = []
    for kind in _kinds(tokens):
        try:
            transitions += _transitions(tokens, begin, kind)
        except _Refused as error:
            if kind.is_required:
                raise error.cause from error
            refused.append(f"{kind.reply}, then {kind.follows}: {error.cause.message}")
    return Proof(tuple(transitions), tuple(refused))


class _Kind(NamedTuple):
    reply: str
    follows: str
    cut: bool = False
    is_required: bool = False


class _Refused(Exception):
    """The template takes no conversation of this kind."""

    def __init__(self, cause: DataError):
        super().__init__(str(cause))
        self.cause = cause


def _kinds(tokens: TurnTokens) -> list[_Kind]:
    kinds = [
        _Kind("answer", "user", is_required=True),
        _Kind("answer", "user", cut=True, is_required=True),
        _Kind("thought", "user"),
    ]
    if tokens.tools:
        kinds += [
            _Kind("call", "tool", is_required=True),
            _Kind("thought and call", "tool"),
            _Kind("answer", "tool", is_required=True),  # to a call that could not be read
        ]
    return kinds


def _transitions(tokens: TurnTokens, begin: TurnState, kind: _Kind) -> list[Transition]:
    transitions = []
    state = begin
    for _ in range(_NUM_TURNS):
        reply = _reply(tokens, kind, state)
        sampled_ids = _canonical_ids(tokens, state, reply, kind)
        result = _after(tokens, state, sampled_ids, reply, _following(tokens, kind.follows))
        _compare(tokens, result)
        transitions.append(Transition(kind.reply, kind.follows, kind.cut, result.restart))
        state = result.state
    return transitions


def _after(
    tokens: TurnTokens,
    state: TurnState,
    sampled_ids: Sequence[int],
    reply: Message,
    following: Sequence[Message],
) -> NextTurn:
    try:
        result = tokens.after(state, sampled_ids, reply, following)
    except DataError as error:
        raise _Refused(error) from error
    said = tokens.markers.escape(following[-1]["content"])
    _require_written(tokens, result, said, following[-1]["role"])
    if not reply.get("tool_calls"):
        _require_written(tokens, result, _ANSWER, "policy")
    return result


def _require_written(tokens: TurnTokens, result: NextTurn, said: str, who: str) -> None:
    if said in result.state.text:
        return
    raise DataError(
        f"the chat template drops what the {who} says in a later turn",
        where=f"{tokens.template.where}, turn {result.state.turn}",
        remedy="let the environment answer as a user; or use the chat template of a model of this "
        "tokenizer that knows the role",
    )


def _reply(tokens: TurnTokens, kind: _Kind, state: TurnState) -> Message:
    content = ""
    if "thought" in kind.reply:
        content = f"<think>\n{_THOUGHT}\n</think>\n\n"
    if "call" not in kind.reply:
        return {"role": "assistant", "content": content + _ANSWER}
    call = {
        "type": "function",
        "id": f"call00{state.turn:03d}",  # nine signs, as Mistral's templates want it
        "function": {"name": _tool_name(tokens), "arguments": {"x": "1"}},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _following(tokens: TurnTokens, role: str) -> list[Message]:
    """Return a message of the environment with a marker in it, which must stay text."""
    content = _SAID
    for marker in tokens.markers.examples:
        content += f" {marker}"
    message: Message = {"role": role, "content": content}
    if role == "tool":
        message["name"] = _tool_name(tokens)
    return [message]


def _tool_name(tokens: TurnTokens) -> str:
    return str(_function(tokens.tools[0])["name"])


def _function(tool: Any) -> Any:
    return tool.get("function", tool)


def _canonical_ids(
    tokens: TurnTokens, state: TurnState, reply: Message, kind: _Kind
) -> tuple[int, ...]:
    """Return what a policy that writes as the template does would sample: the ids behind the
    request, up to the first that ends a turn. Where the template rewrites the request or drops the
    thought, the reply's content. A reply that is cut has no end."""
    if not kind.cut:
        written = _written_by_template(tokens, state, reply, kind)
        if written:
            return written
    opening = opening_of(state.text, tokens.assistant_prefix)
    text = reply["content"].removeprefix(opening)
    ids = tokens.encode(state.text + text, turn=state.turn + 1).token_ids
    num_asked = len(state.token_ids)
    if ids[:num_asked] == state.token_ids:
        ids = ids[num_asked:]
    else:  # the tokenizer would join the request and the reply
        ids = tokens.encode(text, turn=state.turn + 1).token_ids
    if kind.cut:
        return ids
    return (*ids, tokens.stop_token_ids[0])


def _written_by_template(
    tokens: TurnTokens, state: TurnState, reply: Message, kind: _Kind
) -> tuple[int, ...]:
    for form in tokens.forms(reply):
        following = with_call_ids(tokens.escaped(_following(tokens, kind.follows)), reply)
        messages = [*state.messages, form, *following]
        try:
            text = tokens.render(messages, turn=state.turn + 1)
        except DataError:  # told where the reply is used
            continue
        if "thought" in kind.reply and _THOUGHT not in text[len(state.text) :]:
            continue
        whole = tokens.encode(text, turn=state.turn + 1).token_ids
        num_asked = len(state.token_ids)
        if whole[:num_asked] == state.token_ids:
            return _first_turn(tokens, whole[num_asked:])
    return ()


def _first_turn(tokens: TurnTokens, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids up to the first that ends a turn; nothing where none does."""
    for place, token_id in enumerate(token_ids):
        if token_id in tokens.stop_token_ids:
            return tuple(token_ids[: place + 1])
    return ()


def _compare(tokens: TurnTokens, result: NextTurn) -> None:
    """Raise DataError where the ids of a request are not those of its whole text."""
    state = result.state
    expected = tokens.encode(state.text, turn=state.turn).token_ids
    if state.token_ids == expected:
        return
    place = 0
    while state.token_ids[place : place + 1] == expected[place : place + 1]:
        place += 1
    ours = tokens.markers.text_of(state.token_ids[place : place + 8])
    theirs = tokens.markers.text_of(expected[place : place + 8])
    raise DataError(
        f"ids of a later turn are not those of the chat template: from token {place} on {ours!r} "
        f"is encoded where the whole text has {theirs!r}",
        where=f"{tokens.template.where}, turn {state.turn}",
        remedy="use a chat template that begins and ends turns with special tokens",
    )


def _require_tools(tokens: TurnTokens, opening: Sequence[Message]) -> None:
    """Raise DataError where neither the template nor a system message names a tool. What else is
    said in `opening` does not count: a question may have the word by chance."""
    told = [message for message in opening if message["role"] == "system"]
    text = tokens.begin([*told, _QUESTION]).text
    for tool in tokens.tools:
        if _function(tool)["name"] not in text:
            raise DataError(
                f"the chat template does not write the tool {_function(tool)['name']!r}",
                where=tokens.template.where,
                remedy="describe the tools in the domain's system_prompt, or use the chat template "
                "of a model that knows tools",
            )
