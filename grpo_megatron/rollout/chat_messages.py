"""Messages of OpenAI's API: as chat templates take them, as programs get them, and compared.

Clients send a conversation back in other words than they got it: content None or "", arguments of
calls written anew, fields without a value. What says the same is equal here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.json_bodies import well_formed, well_formed_text
from grpo_megatron.data.reply_forms import arguments_as_table
from grpo_megatron.errors import DataError

_ROLES = ("system", "user", "assistant", "tool")
_OTHER_NAMES = {"developer": "system"}
_OF_ANSWERS = ("refusal", "annotations", "audio", "function_call", "parsed")
"""What clients keep of an answer and send back with it: never the policy's words."""
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation as chat templates take it: content is text, fields without a value are
    left out. DataError names the message that is none, has no known role, or parts that are no
    text."""
    return [_plain(message, number) for number, message in enumerate(messages)]


def sent_message(reply: Message) -> Message:
    """Return a reply (`ReadReply.message`) as the program gets it."""
    content: str | None = reply["content"]
    if not reply.get("tool_calls"):
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": reply["tool_calls"]}


def comparable(message: Message) -> str:
    """Return a text that is equal for messages that say the same."""
    found = {}
    for name, value in message.items():
        if name == "tool_calls":
            value = [_comparable_call(call) for call in value or ()]
        if value not in (None, "", []):
            found[name] = value
    return json.dumps(found, sort_keys=True)


def _plain(message: Mapping[str, Any], number: int) -> Message:
    where = f"messages[{number}]"
    role = message.get("role")
    if isinstance(role, str):
        role = _OTHER_NAMES.get(role, role)
    if role not in _ROLES:
        raise DataError(f"the role is {role!r}", where=where, remedy=f"one of {', '.join(_ROLES)}")
    plain: Message = {"role": role, "content": _text_of(message.get("content"), where)}
    for name, value in message.items():
        if name in plain or value in (None, []) or name in _OF_ANSWERS:
            continue
        if name == "tool_calls":
            value = _plain_calls(value, where)
        plain[name] = well_formed(value)
    return plain


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return well_formed_text(content)
    if not isinstance(content, list):
        raise DataError(f"the content is {type(content).__name__}, not text", where=where)
    text = ""
    for part in content:
        kind = "no table"
        if isinstance(part, Mapping):
            kind = part.get("type", "text")
            if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
                text += part["text"]
                continue
        raise DataError(
            f"the content has a part that is no text ({kind})",
            where=where,
            remedy="only text is trained",
        )
    return well_formed_text(text)


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of functions, with id, name and arguments: a table, as templates want it, or a text
    that is none."""
    if not isinstance(calls, list):
        raise DataError(f"tool_calls is {type(calls).__name__}, not a list", where=where)
    found = []
    for call in calls:
        function = None
        if isinstance(call, Mapping):
            function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                "a call of a tool names no function",
                where=where,
                remedy='{"id": "…", "type": "function", "function": {"name": …, "arguments": …}}',
            )
        arguments = arguments_as_table(function.get("arguments") or {})
        found.append(
            {
                "type": "function",
                "id": str(call.get("id") or ""),
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return found


def _comparable_call(call: Mapping[str, Any]) -> list[Any]:
    """Id, name and arguments, whatever white space and order of names the arguments have, and
    however their numbers are written."""
    arguments = _with_plain_numbers(arguments_as_table(call["function"]["arguments"]))
    return [call.get("id", ""), call["function"]["name"], arguments]


def _with_plain_numbers(value: Any) -> Any:
    """Return arguments with all numbers as the floats that JavaScript makes of them, which writes
    1.0 as 1 and -0.0 as 0."""
    if isinstance(value, Mapping):
        return {name: _with_plain_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_plain_numbers(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return float(value) + 0.0
    except OverflowError:  # an integer that no float holds
        return value
