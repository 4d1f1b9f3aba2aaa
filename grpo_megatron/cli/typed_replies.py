"""What a person types in place of the policy: turns as lines, and calls of tools as JSON."""

import asyncio
import contextlib
import json
import os
import select
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.conversation import opening_of
from grpo_megatron.data.reply_forms import THOUGHT_BEGIN, THOUGHT_END, reply_forms
from grpo_megatron.data.tool_calls import begins_call, call_format, text_before_calls
from grpo_megatron.environments.protocol import ToolSchema
from grpo_megatron.errors import DataError

_LOOK_S = 0.05
_CHUNK = 1 << 16
_CALL_ID = "t0000c000"
"""Nine signs, as Mistral's templates want it."""
_QUESTION = {"role": "user", "content": "1 + 1?"}


class InputLines:
    """Lines of a file descriptor, which the event loop does not wait for: environments go on, and
    Ctrl-C ends the command, while a person thinks."""

    def __init__(self, file: int):
        self._file = file
        self._unread = b""
        self._has_ended = False

    async def next_reply(self) -> str | None:
        """Lines up to an empty one or the end of the input; None: it has ended before any. Empty
        lines in front of a reply are left out."""
        lines: list[str] = []
        while True:
            line = await self._next_line()
            if line is None:
                break
            if line.strip():
                lines.append(line)
            elif lines:
                break
        if not lines:
            return None
        return "\n".join(lines)

    async def _next_line(self) -> str | None:
        while b"\n" not in self._unread and not self._has_ended:
            while not select.select([self._file], [], [], 0)[0]:
                await asyncio.sleep(_LOOK_S)
            read = os.read(self._file, _CHUNK)
            self._unread += read
            self._has_ended = not read
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").removesuffix("\r")


def typed_call(text: str) -> Mapping[str, Any] | None:
    """The call that a text is: `{"name": …, "arguments": …}`, or None."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or set(found) != {"name", "arguments"}:
        return None
    if not isinstance(found["name"], str) or not isinstance(found["arguments"], dict):
        return None
    return found


def call_text(
    call: Mapping[str, Any],
    domain: DomainConfig,
    template: ChatTemplate,
    tools: Sequence[ToolSchema],
    end_text: str,
) -> str:
    """A call as the model writes it, which is how its chat template does; behind the end of a
    thought where the request has begun one. end_text: what ends a turn. DataError where the
    template does not write calls, ConfigError as of `call_format`."""
    assert domain.episodes is not None
    format_name = call_format(domain.episodes.tool_format, template)
    call_id = _CALL_ID
    if format_name == "kimi_k2":
        call_id = f"functions.{call['name']}:0"
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    tool_call = {"type": "function", "id": call_id, "function": function}
    reply = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    arguments = {**domain.template_arguments, "tools": list(tools)}
    asked = [_QUESTION]
    if domain.system_prompt is not None:  # there are templates that insist on one
        asked.insert(0, {"role": "system", "content": domain.system_prompt})
    before = template.render(asked, arguments, day=domain.template_date)
    question = template.render(
        asked, arguments, day=domain.template_date, add_generation_prompt=False
    )
    begin = ""
    if opening_of(before, domain.assistant_prefix).startswith(THOUGHT_BEGIN):
        begin = f"{THOUGHT_END}\n\n"
    for form in reply_forms(reply, splits_thoughts=False):
        with contextlib.suppress(DataError):  # templates differ in what arguments are
            whole = template.render(
                [*asked, form],
                arguments,
                day=domain.template_date,
                add_generation_prompt=False,
            )
            if whole.startswith(before):
                return begin + _without_end(whole.removeprefix(before), end_text)
            # the request begins a thought that the conversation has not
            answer = whole.removeprefix(question)
            if len(answer) < len(whole) and begins_call(format_name, answer):
                written = answer.removeprefix(text_before_calls(format_name, answer))
                return begin + _without_end(written.lstrip("\n"), end_text)
    raise DataError(
        "the chat template does not write a call of a tool as an answer",
        where=template.where,
        remedy="type the call as the model writes it",
    )


def _without_end(text: str, end_text: str) -> str:
    """A turn without what ends it; where the next message does that, nothing is there."""
    written, end, _ = text.rpartition(end_text)
    if end:
        return written
    return text
