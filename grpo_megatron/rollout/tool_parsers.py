"""Calls of tools in a reply, read by vLLM's parsers, which need no engine.

Importing them takes about ten seconds of a processor and 700 MiB, once in a process, when the
first reader is made, or a format is looked up. What they leave open is decided here: a thought has
no calls, a malformed call is one clear text for the policy, and ids do not depend on chance."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.data.conversation import Message
from grpo_megatron.data.json_bodies import no_constant
from grpo_megatron.data.tool_calls import (
    begins_call,
    broken_call,
    example_of,
    num_begun_calls,
    split_thought,
    text_before_calls,
)
from grpo_megatron.environments.protocol import Reply, ToolCall, ToolSchema
from grpo_megatron.errors import ConfigError, DataError, raised_as

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

_PARSERS = ("vllm.tool_parsers", "vllm.parser")
"""Loggers that print a traceback for every malformed call."""
_FAMILIES_WITH_IDS = ("kimi_k2", "mistral")
"""Formats in which the policy writes the id of a call."""
_MISTRAL_ID_LENGTH = 9
_GLM_NAME = re.compile(r"<tool_call>\s*+([^\s<{]++)\s*+(?=<arg_key>|</tool_call>)")
"""A name in front of arguments; a call that is JSON has none."""
_DEEPEST = 100
"""Tables and lists within one another: an environment's own code has less stack than parsers."""


class ReadReply(NamedTuple):
    """A reply as the environment and as the chat template want it."""

    reply: Reply
    message: Message


class _Malformed(Exception):
    """Says what is wrong with a call."""


def require_format(name: str) -> None:
    """Raise ConfigError where vLLM has no parser of this name."""
    from vllm.tool_parsers import ToolParserManager

    known = ToolParserManager.list_registered()
    if name not in known:
        raise ConfigError(
            f"there is no format {name!r} of calls",
            where="tool_format",
            remedy=did_you_mean(name, known),
        )


class ToolCallReader:
    """Reads calls in one format. `tokenizer_directory`: parsers look up special tokens in it.

    Raises ConfigError where vLLM has no such parser, DataError where the tokenizer lacks what the
    format needs."""

    def __init__(self, format_name: str, tokenizer_directory: Path):
        from transformers import AutoTokenizer
        from vllm.tool_parsers import ToolParserManager

        for name in _PARSERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        require_format(format_name)
        self.format_name = format_name
        self._parser_class = ToolParserManager.get_tool_parser(format_name)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory, local_files_only=True)
        with raised_as(
            DataError,
            f"the tokenizer does not know calls in the format {format_name!r}",
            where=tokenizer_directory,
            remedy='set tool_format to that of the model, or to "auto"',
        ):
            self._parser_class(self._tokenizer)

    def read(self, text: str, tools: Sequence[ToolSchema], *, turn: int) -> ReadReply:
        """Read the calls of a reply (`TurnTokens.reply_text`), of turn number `turn`.

        Where one is malformed, none is made: `Reply.error` says what is wrong, and the message has
        the text as it is. Never raises for what the policy wrote."""
        thought, answer = split_thought(self.format_name, text)
        try:
            calls = self._calls(answer, tools, turn)
        except _Malformed as error:
            return _without_calls(text, self._unreadable_text(error))
        if not calls:
            return _without_calls(text, None)
        content = thought + text_before_calls(self.format_name, answer)
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [_as_message(call) for call in calls],
        }
        return ReadReply(Reply(content, tuple(calls)), message)

    def _calls(self, answer: str, tools: Sequence[ToolSchema], turn: int) -> list[ToolCall]:
        """Raises _Malformed where the answer means to call and no call, or a bad one, is read."""
        request = self._request(tools)
        unknown = self._unknown_tools(answer, request)
        if unknown:
            request = self._request([*tools, *unknown])
        try:
            parser = self._parser_class(self._tokenizer, request.tools)
            found = parser.extract_tool_calls(answer, request).tool_calls
        except RecursionError as error:
            raise _Malformed("the arguments are nested too deeply") from error
        except Exception as error:  # parsers of many authors, and any text
            raise _Malformed(str(error) or type(error).__name__) from error
        if not found and begins_call(self.format_name, answer):
            raise _Malformed("no whole call was found")
        broken = broken_call(self.format_name, answer)
        if broken is not None:
            raise _Malformed(
                f"call {broken} is not whole: a part of it has no end, or something stands between "
                "its parts"
            )
        num_begun = num_begun_calls(self.format_name, answer)
        if len(found) < num_begun:
            raise _Malformed(f"of {num_begun} calls only {len(found)} are whole")
        ids = self._written_ids(answer)
        calls = []
        for number, call in enumerate(found):
            call_id = f"t{turn:04d}c{number:03d}"  # nine signs, as Mistral's templates want it
            if self.format_name in _FAMILIES_WITH_IDS:
                call_id = ids.get(number) or _stable_id(self.format_name, call.id) or call_id
            name = call.function.name
            _refuse_half_characters(name, "the name of a call")
            _refuse_half_characters(call_id, f"the id of {name}")
            calls.append(ToolCall(name, _arguments(name, call.function.arguments), call_id))
        return calls

    def _unknown_tools(self, answer: str, request: "ChatCompletionRequest") -> list[ToolSchema]:
        """Return tools of these names that the answer calls and nobody has: GLM's parser drops such
        calls, where all others leave them to the environment, which says which tools there are."""
        if self.format_name != "glm45":
            return []
        known = {tool.function.name for tool in request.tools or ()}
        called = dict.fromkeys(_GLM_NAME.findall(answer))  # once, in their order
        unknown: list[ToolSchema] = []
        for name in called:
            if name not in known:
                unknown.append({"type": "function", "function": {"name": name}})
        return unknown

    def _request(self, tools: Sequence[ToolSchema]) -> "ChatCompletionRequest":
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        with raised_as(
            DataError,
            "a tool's schema is not valid",
            where="the environment's tools",
            remedy='a tool is {"type": "function", "function": {"name": …, "parameters": …}}',
        ):
            return ChatCompletionRequest(
                model="policy",
                messages=[{"role": "user", "content": ""}],
                tools=[dict(tool) for tool in tools] or None,
            )

    def _written_ids(self, answer: str) -> dict[int, str]:
        """Return ids by the number of their call, where the policy has written a list with ids.
        Those that Mistral's templates refuse are left out."""
        if self.format_name != "mistral":
            return {}
        try:
            written = json.loads(answer.rpartition("[TOOL_CALLS]")[2])
        except (ValueError, RecursionError):
            return {}
        ids = {}
        if isinstance(written, list):
            for number, call in enumerate(written):
                call_id = None
                if isinstance(call, Mapping):
                    call_id = call.get("id")
                if isinstance(call_id, str) and len(call_id) == _MISTRAL_ID_LENGTH:
                    ids[number] = call_id
        return ids

    def _unreadable_text(self, error: _Malformed) -> str:
        """Say why a call could not be read, and how one is written. What the policy wrote may stand
        in it: half of a character as its number."""
        told = f"the call could not be read: {error}".encode(errors="backslashreplace").decode()
        example = example_of(self.format_name)
        if example:
            told += f". A call is written as {example}"
        return told


def _arguments(name: str, written: str) -> Mapping[str, Any]:
    """Raises _Malformed for what is no JSON object, or not as every reader of JSON takes it."""
    told = f"the arguments of {name}"
    try:
        arguments = json.loads(written, parse_constant=no_constant)
    except ValueError as error:
        raise _Malformed(f"{told} are no JSON: {error}") from error
    except RecursionError as error:
        raise _Malformed(f"{told} are nested too deeply") from error
    if not isinstance(arguments, dict):
        raise _Malformed(f"{told} are no JSON object")
    if _is_deeper(arguments, _DEEPEST):
        raise _Malformed(f"{told} are nested too deeply")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # 1e999, which is read as infinite
        raise _Malformed(f"{told} have a number that is too large") from error
    _refuse_half_characters(text, f"an argument of {name}")
    return arguments


def _is_deeper(value: Any, most: int) -> bool:
    """Whether there are more than `most` tables and lists within one another."""
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return False
    if most == 0:
        return True
    return any(_is_deeper(item, most - 1) for item in inner)


def _refuse_half_characters(text: str, told: str) -> None:
    r"""Raise _Malformed for what JSON can write (`"\ud800"`) and no file or socket takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Malformed(f"{told} has half of a character") from error


def _stable_id(format_name: str, call_id: str | None) -> str | None:
    """Return the id that the policy wrote; None where the parser has made one up."""
    if format_name == "kimi_k2" and call_id and ":" in call_id:
        return call_id
    return None


def with_refused_calls(text: str, why: str) -> ReadReply:
    """Return a reply whose calls were read and cannot be made, as one whose calls could not be
    read: `Reply.error` says why, and the message has the text as it is."""
    return _without_calls(text, f"the call cannot be made: {why}")


def _without_calls(text: str, error: str | None) -> ReadReply:
    return ReadReply(Reply(text, (), error), {"role": "assistant", "content": text})


def _as_message(call: ToolCall) -> dict[str, Any]:
    """Return a call in the form of OpenAI's API. Arguments are text: templates that want a table
    are given one."""
    function = {
        "name": call.name,
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
    }
    return {"type": "function", "id": call.id, "function": function}
