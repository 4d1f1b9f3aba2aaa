"""A turn's text as the environment and as the chat template want it."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.tool_calls import call_format
from grpo_megatron.environments.protocol import Reply, ToolSchema
from grpo_megatron.rollout.tool_parsers import ReadReply, ToolCallReader

_importing = threading.Lock()
"""Domains load their parsers side by side, and transformers, which these import, is found without
its names where two threads import it for the first time at once."""


class ReplyReader:
    """Reads replies of one domain; parsers of calls are loaded with the first tools.

    tool_format: `environment.tool_format`; tokenizer_directory: where its tokenizer is. ConfigError
    and DataError as of `call_format` and `ToolCallReader`, when they are loaded."""

    def __init__(self, tool_format: str, template: ChatTemplate, tokenizer_directory: Path):
        self._tool_format = tool_format
        self._template = template
        self._tokenizer_directory = tokenizer_directory
        self._calls: ToolCallReader | None = None
        self._loading = asyncio.Lock()

    async def load(self, tools: Sequence[ToolSchema]) -> None:
        """Load the parsers for replies with these tools in a thread: requests of other episodes go
        on meanwhile."""
        if not tools or self._calls is not None:
            return
        async with self._loading:
            if self._calls is None:
                self._calls = await asyncio.to_thread(self._reader_of_calls)

    def __call__(self, text: str, tools: Sequence[ToolSchema], turn: int) -> ReadReply:
        """Read the reply of turn number `turn`; without tools it is all text."""
        if not tools:
            return ReadReply(Reply(text), {"role": "assistant", "content": text})
        if self._calls is None:
            self._calls = self._reader_of_calls()
        return self._calls.read(text, tools, turn=turn)

    def _reader_of_calls(self) -> ToolCallReader:
        format_name = call_format(self._tool_format, self._template)
        with _importing:
            return ToolCallReader(format_name, self._tokenizer_directory)
