"""Conversations: lists of `{"role": "user", "content": "…"}`, as rows of data sets hold them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt

Message = dict[str, Any]
MESSAGES = "messages"
"""Where a prompt's metadata has the conversation, and the name of the field in rows."""
RESPONSES = "responses"
"""The same of the answers that are trained, where a run trains those of its rows."""
TOOLS = "tools"
"""The same of the tools that the chat template writes, and the name by which it knows them."""

TELLING_REMEDY = (
    "write all that the answer says into its content, a thought between the tags of the model "
    "(<think>…</think>), or leave the row out"
)
_TELLING = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "reasoning_details",
    "thinking",
    "thought",
    "tool_plan",
    "refusal",
    "audio",
)
"""Fields by which an assistant's message says something that is not in its content."""
_CALLS = ("tool_calls", "function_call")
"""Those beside which a message needs no content."""
_NOTHING = ("", "[]", "{}", "null")
_OPENED_THOUGHT = re.compile(r"<think>\s*\Z")
_CLOSED_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
_ENDS_IN_WORD = re.compile(r"\w\s*\Z")
_THOUGHT_BEGIN = "<think>"
_THOUGHT_END = "</think>"


def is_conversation(value: object) -> bool:
    """Whether a field holds messages: a list of tables, or a table of lists."""
    if isinstance(value, Mapping):
        return "role" in value and "content" in value
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], Mapping)


def without_json(value: Any) -> Any:
    """Return the value of a field; where it is JSON text of messages, as CSV has them, these."""
    if not isinstance(value, str):
        return value
    found = json_list_in(value)
    if found and all(isinstance(one, Mapping) and "role" in one for one in found):
        return found
    return value


def json_list_in(text: str) -> list[Any]:
    """Return the list whose JSON is a text; empty where it is none."""
    if not text.lstrip().startswith("["):
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return list(found)


def read_conversation(value: Any, *, where: str, field: str) -> list[Message]:
    """Return the messages of a field, as `read_messages`; DataError where no user speaks."""
    messages = read_messages(value, where=where, field=field)
    require_user(messages, where=where, field=field)
    return messages


def read_messages(value: Any, *, where: str, field: str) -> list[Message]:
    """Return the messages of a field, each with a role and text. DataError names the one that has
    none.

    Fields without a value are left out: Parquet has them in every message that lacks them. Parts
    `{"type": "text", "text": …}` are put together; other parts are refused. All values can be
    written as JSON: times and decimals of Parquet become text."""
    value = without_json(value)
    if isinstance(value, Mapping):  # a sequence of tables, as older data sets store it
        value = _rows_of(value, where, field)
    messages = []
    for number, raw in enumerate(value, start=1):
        place = f"{where}, field {field!r}, message {number}"
        if not isinstance(raw, Mapping):
            raise DataError(
                f"a message is {type(raw).__name__}, expected a table of role and content",
                where=place,
            )
        messages.append(_message(raw, place))
    return messages


def require_user(messages: Sequence[Message], *, where: str, field: str) -> None:
    """Raise DataError where no message is of a user."""
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"field {field!r} has no message of a user",
            where=where,
            remedy='a conversation is a list of {"role": "user", "content": "…"}',
        )


def _rows_of(table: Mapping[str, Any], where: str, field: str) -> list[Message]:
    """Return a table of lists as a list of tables; columns without a value are left out."""
    columns = {name: column for name, column in table.items() if column is not None}
    if not all(isinstance(column, list) for column in columns.values()):
        raise DataError(
            f"field {field!r} is one message, expected a list of messages",
            where=where,
            remedy=f'put it in a list: "{field}": [{{"role": "…", "content": "…"}}]',
        )
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{length} of {name!r}" for name, length in lengths.items())
        raise DataError(
            f"field {field!r} has lists of different lengths: {told}",
            where=where,
            remedy="give every message one value of each",
        )
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _message(raw: Mapping[str, Any], place: str) -> Message:
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(
            f"the message has no role; it has: {', '.join(raw)}",
            where=place,
            remedy='give it "role": "system", "user" or "assistant"',
        )
    content = raw.get("content")
    if content is None and any(_says_something(raw.get(name)) for name in _CALLS):
        content = ""  # as OpenAI's API has it beside calls
    message: Message = {"role": role, "content": _text_of(content, place)}
    for name, value in raw.items():
        if value is not None and name not in message:
            message[name] = _json_value(value, name, place)
    return message


def _json_value(value: Any, name: str, place: str) -> Any:
    """Return a value as JSON can have it. DataError where it is nothing of the kind."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, name, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, name, place) for item in value]
    raise DataError(
        f"the message's field {name!r} has a value of {type(value).__name__}, which JSON has not",
        where=place,
        remedy="remove the field, or write it as text",
    )


def _text_of(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"the message's content is {type(content).__name__}, expected text",
            where=place,
            remedy='write its text, "" where it says nothing, or leave the row out',
        )
    text = ""
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            remedy = "only text is trained: leave out rows with images, sound or tools"
            if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
                remedy = (
                    "for a model that sees, write <image> in the text where the image is, and put "
                    "the image into the row's field of images (docs/vision.md)"
                )
            raise DataError(
                "the message's content has a part that is no text", where=place, remedy=remedy
            )
        text += part["text"]
    return text


def conversation_of(metadata: Mapping[str, Any]) -> list[Message]:
    """Return the conversation that the recipe has made of a problem; empty where it has none."""
    found = metadata.get(MESSAGES)
    if not isinstance(found, list | tuple):
        return []
    return list(found)


def tools_of(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a row: a list of tables, or its JSON text. Empty where it has none, or
    its field is something else of its own.

    Of a list, fields without a value are left out: Parquet has those of all tools in each."""
    found = metadata.get(TOOLS)
    if isinstance(found, str):
        found = json_list_in(found)
    elif isinstance(found, list):
        found = _with_values(found)
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        return []
    return found


def _with_values(value: Any) -> Any:
    """Return a value without the fields, of all tables in it, that have none."""
    if isinstance(value, Mapping):
        return {name: _with_values(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_with_values(item) for item in value]
    return value


def split_reply(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """(the conversation up to the last assistant turn, that turn's text); the text is None where
    somebody else speaks last."""
    if messages[-1]["role"] != "assistant":
        return list(messages), None
    return list(messages[:-1]), messages[-1]["content"]


def untold_fields(message: Message) -> tuple[str, ...]:
    """Return the names of fields of an assistant's message that say something beside its content,
    such as `tool_calls`: where the content is trained, they are lost. Empty ones say nothing."""
    return tuple(name for name in _TELLING if _says_something(message.get(name)))


def _says_something(value: Any) -> bool:
    """Whether there is a value: also in JSON text, and in tables, whose fields Parquet has without
    a value where another row has one."""
    if isinstance(value, str):
        return value.strip() not in _NOTHING
    if isinstance(value, Mapping):
        return any(_says_something(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_says_something(part) for part in value)
    return bool(value)


def are_responses(value: object) -> bool:
    """Whether a field holds responses that can be trained: a list of texts, or none (in CSV an
    empty text)."""
    if value is None or value == "":
        return True
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def replies_of(reply: str, responses: Sequence[str] | None) -> list[str]:
    """Return all different answers that a row has to its conversation, in full. `reply` is that of
    the last turn.

    Where `reply` ends with the first of `responses`, these begin behind what their prompt had
    opened, as those of samples do; else they are whole."""
    opening = ""
    if responses and responses[0] and reply.endswith(responses[0]):
        opening = reply.removesuffix(responses[0])
    replies = [reply]
    for response in responses or ():
        whole = opening + response
        if whole not in replies:
            replies.append(whole)
    return replies


def last_question(messages: Sequence[Message]) -> str:
    """Return what the user has said last."""
    for message in reversed(messages):
        if message["role"] == "user":
            return str(message["content"])
    raise AssertionError("read_conversation lets none pass without a user")


def with_last_question(
    messages: Sequence[Message], rephrase: Callable[[str], str]
) -> list[Message]:
    """Return the conversation with `rephrase` of what the user has said last."""
    changed = list(messages)
    for place in reversed(range(len(changed))):
        if changed[place]["role"] == "user":
            changed[place] = changed[place] | {"content": rephrase(changed[place]["content"])}
            return changed
    raise AssertionError("read_conversation lets none pass without a user")


def opening_of(prompt: str, assistant_prefix: str) -> str:
    """Return the part of an answer that its prompt already has: the prefix that the recipe sets, or
    the `<think>` with which a chat template ends."""
    if assistant_prefix:
        return assistant_prefix
    opened = _OPENED_THOUGHT.search(prompt)
    if opened is None:
        return ""
    return opened[0]


def begun_answer(prompt: str, assistant_prefix: str) -> str:
    """Return all that a prompt already has of its answer: a `<think>` with which the chat template
    ends, or a thought that it has closed without a word, and the prefix that the recipe sets."""
    before_prefix = prompt.removesuffix(assistant_prefix)
    begun = _OPENED_THOUGHT.search(before_prefix) or _CLOSED_THOUGHT.search(before_prefix)
    if begun is None:
        return assistant_prefix
    return begun[0] + assistant_prefix


def behind_opening(prompt: str, assistant_prefix: str, answer: str) -> str:
    """Return an answer without what its prompt already has of it. White space may differ."""
    for opening in (begun_answer(prompt, assistant_prefix), assistant_prefix):
        if not opening.strip():
            continue
        if answer.startswith(opening):
            return answer.removeprefix(opening)
        found = _with_any_blanks(opening).match(answer)
        if found is not None:
            return answer[found.end() :]
    return answer


def _with_any_blanks(opening: str) -> re.Pattern[str]:
    """Return what finds an opening whose white space may differ, but not within a word. Behind one
    that ends with some it takes the answer's."""
    words = re.findall(r"</?think>|[^\s<]+|<", opening)
    pattern = r"\s*" + r"\s*".join(map(re.escape, words))
    if _ENDS_IN_WORD.search(opening):
        pattern += r"(?!\w)"
    if opening[-1].isspace():
        pattern += r"\s*"
    return re.compile(pattern)


def leaves_thought_open(begun: str, answer: str) -> bool:
    """Whether a prompt has begun a thought (`begun_answer`) that the answer behind does not
    close."""
    is_open = begun.rfind(_THOUGHT_BEGIN) > begun.rfind(_THOUGHT_END)
    return is_open and _THOUGHT_END not in answer


def thinks_again(begun: str, answer: str) -> bool:
    """Whether a prompt has closed the thought (`begun_answer`) and the answer behind begins one."""
    return _THOUGHT_END in begun and answer.lstrip().startswith(_THOUGHT_BEGIN)


def with_answer(prompt: Prompt, response: str, assistant_prefix: str) -> list[Message]:
    """Return the conversation of a prompt of the chat template, with a sampled answer as its last
    turn."""
    text = opening_of(prompt.text, assistant_prefix) + response
    return [*prompt.metadata[MESSAGES], {"role": "assistant", "content": text}]
