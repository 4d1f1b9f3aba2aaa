"""A reply as a chat template may want it: with its thought apart or in its content, and with the
arguments of calls as a table or as JSON text; and what tools say to it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_megatron.data.conversation import Message
from grpo_megatron.errors import DataError

THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"
REASONING = "reasoning_content"
"""The field that templates read a thought from."""
_NO_CALL_ID = "malformed"
"""Nine signs, as Mistral's templates want it."""


def reply_forms(reply: Message, *, splits_thoughts: bool) -> list[Message]:
    """Return messages that say the same as `reply`, in the order in which they are tried; a restart
    has the first. `splits_thoughts`: whether the template reads `reasoning_content`. Raises
    DataError where the arguments of a call are text that is no JSON."""
    content = reply.get("content") or ""
    bodies = [{"content": content}]
    if splits_thoughts and REASONING not in reply:
        thought = _split_thought(content)
        if thought is not None:
            bodies.insert(0, thought)
    if reply.get("tool_calls"):
        bodies = _without_last_space(bodies)
    forms = []
    for calls in _calls(reply.get("tool_calls")):
        for body in bodies:
            form = {**reply, **body}
            if calls:
                form["tool_calls"] = calls
            forms.append(form)
    return forms


def argument_forms(messages: Sequence[Message]) -> list[list[Message]]:
    """Return a conversation as a template may want it, in the order in which it is tried: as it
    is, with the arguments of calls as tables, then as text. Text that is no table of JSON stays
    text, and calls that have no arguments, or are written in another way, stay as they are."""
    forms = [list(messages)]
    for change in (arguments_as_table, _as_text):
        form = []
        for message in messages:
            calls = message.get("tool_calls")
            if isinstance(calls, list | tuple):
                message = {**message, "tool_calls": _with_arguments(calls, change)}
            form.append(message)
        if form not in forms:
            forms.append(form)
    return forms


def arguments_as_table(arguments: Any) -> Any:
    """Return arguments of a call as a table where they are JSON text of one, else as they are: a
    call that no reader made may have any text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        table = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(table, dict):
        return table
    return arguments


def with_call_ids(messages: Sequence[Message], reply: Message) -> list[Message]:
    """Return messages of which each result of a tool names its call: templates write that, or
    insist. A result without an id is of the next call of the reply; without calls, of a malformed
    one. What stands behind another reply is not about this one, and stays as it is."""
    ids = [str(call.get("id", _NO_CALL_ID)) for call in reply.get("tool_calls") or ()]
    num_answers = num_before_reply(messages)
    named = []
    for message in messages[:num_answers]:
        if message["role"] == "tool":
            call_id = _NO_CALL_ID
            if ids:
                call_id = ids.pop(0)
            message = {"tool_call_id": call_id, **message}
        named.append(message)
    return [*named, *messages[num_answers:]]


def said_by_user(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with what tools say as said by the user, up to the next reply."""
    num_answers = num_before_reply(messages)
    changed = []
    for message in messages[:num_answers]:
        if message["role"] == "tool":
            message = {"role": "user", "content": message["content"]}
        changed.append(message)
    return [*changed, *messages[num_answers:]]


def num_before_reply(messages: Sequence[Message]) -> int:
    """Return how many messages stand in front of the first reply among them."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            return number
    return len(messages)


def _split_thought(content: str) -> dict[str, str] | None:
    """`<think>a</think>b` in two fields; None where the content does not begin with a thought that
    ends."""
    before, begin, rest = content.partition(THOUGHT_BEGIN)
    thought, end, answer = rest.partition(THOUGHT_END)
    if before.strip() or not begin or not end:
        return None
    return {REASONING: thought, "content": answer}


def _without_last_space(bodies: list[dict[str, str]]) -> list[dict[str, str]]:
    """Drop white space in front of a call: it may be the template's own, or the policy's."""
    forms = []
    for body in bodies:
        forms.append(body)
        stripped = body["content"].rstrip()
        if stripped != body["content"]:
            forms.append({**body, "content": stripped})
    return forms


def _calls(calls: list[dict[str, Any]] | None) -> list[list[dict[str, Any]] | None]:
    """Return the calls with arguments as tables, then as text: templates take one or the other."""
    if not calls:
        return [None]
    return [_with_arguments(calls, _require_json), _with_arguments(calls, _as_text)]


def _with_arguments(calls: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return calls with `change` of their arguments; one of a data set may have none, or be written
    without `function`, as its template wants it."""
    changed = []
    for call in calls:
        function = None
        if isinstance(call, Mapping):
            function = call.get("function")
        if isinstance(function, Mapping) and "arguments" in function:
            function = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": function}
        changed.append(call)
    return changed


def _require_json(arguments: Any) -> Any:
    """Return the value of arguments that are text. Raises DataError where the text is no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the arguments of a call are no JSON: {error}",
            remedy="leave the call in the content: a malformed call is answered with an error",
        ) from error


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
