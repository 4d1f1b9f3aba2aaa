"""Tools of an MCP server (Model Context Protocol) for the policy; needs the package `mcp`."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.environments.protocol import ToolSchema, Unscorable
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import (
    EXACT_MATCH,
    FinalAnswer,
    ToolEnvironment,
    ToolError,
    check_arguments,
    tool_schema,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards.argument_checks import check_url
from grpo_megatron.types import Problem

_CLOSE_S = 5.0

_Call = tuple[str, dict[str, Any], asyncio.Future[Any]]
"""Name, arguments, and where the result goes."""


def _check(
    *,
    command: Sequence[str] = (),
    url: str | None = None,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> None:
    if isinstance(command, str) or bool(command) == (url is not None):
        raise EpisodeError(
            "exactly one of command and url says where the MCP server is",
            remedy='for example command = ["python", "-m", "my_server"]',
        )
    for number, part in enumerate(command):
        if not isinstance(part, str) or (number == 0 and not part):
            raise EpisodeError(
                f"command has {part!r} where a program and texts for it are expected",
                remedy='for example command = ["python", "-m", "my_server"]',
            )
    if url is not None:
        check_url("url", url)
    if variables is not None and not isinstance(variables, Mapping):
        raise EpisodeError(
            f"variables = {variables!r} is no table", remedy='for example variables = { KEY = "…" }'
        )
    for name, value in (variables or {}).items():
        if not isinstance(value, str):
            raise EpisodeError(
                f"variables has {name} = {value!r}, which is no text",
                remedy=f'write {name} = "{value}"',
            )
    FinalAnswer.check(**{"reward": EXACT_MATCH, **arguments})


@traits(needs=("mcp",), check=_check, network=True)
class McpTools(ToolEnvironment):
    """The tools of a server that `command` starts, one for each episode, with the environment
    `variables`, or of one that listens at `url`. The outcome is `reward` of the answer that ends
    the episode. A server that cannot be reached, or goes, makes the episode unscorable."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        url: str | None = None,
        variables: Mapping[str, str] | None = None,
        reward: str = EXACT_MATCH,
        reward_arguments: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self._final = FinalAnswer(reward, reward_arguments)
        self._command = list(command)
        self._url = url
        self._variables = dict(variables or {})
        self._schemas: dict[str, ToolSchema] = {}
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._session: asyncio.Task[None] | None = None

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """Those of the server, in its order."""
        return tuple(self._schemas.values())

    async def start(self, problem: Problem, seed: int) -> None:
        """Connect, and ask for the tools."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = asyncio.create_task(self._serve(ready))
        await asyncio.wait({self._session, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise Unscorable(f"no MCP server: {self._why()}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text that the tool returns. Raises ToolError where the server says that it is
        an error, in its result or by the protocol."""
        if name not in self._schemas:
            raise ToolError(f"there is no tool {name!r}; {did_you_mean(name, self._schemas)}")
        check_arguments(self._schemas[name], arguments)
        assert self._session is not None, "start comes first"
        self.remember(name, dict(arguments))  # a server may have a state, and need not show it
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((name, dict(arguments), result))
        await asyncio.wait({self._session, result}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise Unscorable(f"the MCP server has gone: {self._why()}")
        found = result.result()
        text = "\n".join(_text_of(part) for part in found.content)
        if found.is_error:
            raise ToolError(text)
        return text

    async def score(self, text: str) -> float:
        """Return the reward of the answer."""
        return await self._final.score(text, self.problem)

    async def close(self) -> None:
        """End the session, and with it the server that it has started."""
        session = self._session
        self._session = None
        if session is not None:
            session.cancel()
            await asyncio.wait({session}, timeout=_CLOSE_S)

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        """The whole session as one task: it must be left by the task that has entered it."""
        from mcp import Client, MCPError, StdioServerParameters
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        server: Any = self._url
        if self._url is None:
            program, *arguments = self._command
            server = StdioServerParameters(
                command=program, args=arguments, env=self._variables or None
            )
        async with Client(server) as client:
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                for found in page.tools:
                    description = found.description or ""
                    schema = tool_schema(found.name, description, found.input_schema)
                    self._schemas[found.name] = schema
                cursor = page.next_cursor
                if not cursor:
                    break
            ready.set_result(None)
            while True:
                name, arguments_of_call, result = await self._calls.get()
                try:
                    answer = await client.call_tool(name, arguments_of_call)
                except MCPError as error:
                    if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):  # no answer
                        raise
                    if not result.done():
                        result.set_exception(ToolError(error.message))
                    continue
                if not result.done():
                    result.set_result(answer)

    def _why(self) -> str:
        """Return what ended the session."""
        assert self._session is not None
        with contextlib.suppress(asyncio.CancelledError):
            error = self._session.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return f"{type(error).__name__}: {error}"
        return "it was cancelled"


def _text_of(part: Any) -> str:
    """Return a part of a result; what is no text is named."""
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[{getattr(part, 'type', 'data')}: not shown]"
