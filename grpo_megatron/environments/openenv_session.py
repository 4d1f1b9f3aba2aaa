"""A session of an OpenEnv server (https://github.com/huggingface/OpenEnv): one WebSocket, one
episode. Its messages are JSON, so that no package of it is needed."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from grpo_megatron.environments.protocol import Unscorable
from grpo_megatron.environments.tools import ToolError
from grpo_megatron.environments.wire import LONGEST_LINE

_LONGEST_REASON = 300
_NO_ROOM = "CAPACITY_REACHED"
_NO_ACTION = "VALIDATION_ERROR"


class Observed(msgspec.Struct, frozen=True):
    """What the server answers to a reset or an action.

    Attributes:
        observation: Fields of the environment's own kind of observation, `metadata` among them.
        reward: Of the action; None where it has none.
        done: Whether the episode has ended."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class RefusedAction(ToolError):
    """An action that is none of the environment's kind."""


class _Message(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any]


class _Schemas(msgspec.Struct, frozen=True):
    action: dict[str, Any]


class OpenEnvSession:
    """A session at `url`, `http://…` or `https://…`, with `headers`. A server that is not there,
    goes, or does not answer within `timeout_s` seconds makes the episode unscorable."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float):
        self._url = url.rstrip("/")
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def connect(self) -> dict[str, Any]:
        """Begin the session. Returns the JSON schema of the environment's actions."""
        self._client = aiohttp.ClientSession(headers=self._headers)
        where = f"{self._url}/schema"
        async with self._answering(where):
            async with self._client.get(where) as response:
                content = await response.read()
                if response.status != 200:
                    raise Unscorable(f"{where} answered {response.status}: no OpenEnv server")
            schemas = msgspec.json.decode(content, type=_Schemas)
            self._socket = await self._client.ws_connect(
                f"{self._url}/ws", max_msg_size=LONGEST_LINE
            )
        return schemas.action

    async def reset(self, parameters: Mapping[str, Any]) -> Observed:
        """Begin the episode. The server leaves out parameters that its environment does not
        take."""
        try:
            return await self._ask("reset", parameters)
        except RefusedAction as error:
            raise Unscorable(f"{self._url} does not begin: {error}") from error

    async def step(self, action: Mapping[str, Any]) -> Observed:
        """Take an action. Raises RefusedAction where it does not fit the environment's kind."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the session, with which the server forgets the episode."""
        client = self._client
        self._client = None
        self._socket = None
        if client is not None:
            await client.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        assert self._socket is not None, "connect comes first"
        asked = msgspec.json.encode({"type": kind, "data": data}).decode()
        async with self._answering(self._url):
            await self._socket.send_str(asked)
            content = await self._socket.receive_str()
            answer = msgspec.json.decode(content, type=_Message)
            if answer.type == "error":
                self._refuse(kind, answer.data)
            if answer.type != "observation":
                raise Unscorable(f"{self._url} answered a {kind} with {answer.type!r}")
            return msgspec.convert(answer.data, Observed)

    def _refuse(self, kind: str, error: Mapping[str, Any]) -> None:
        """Raise what an answer of the kind `error` means."""
        code = error.get("code")
        reason = str(error.get("message"))[:_LONGEST_REASON]
        if code == _NO_ACTION:
            raise RefusedAction(_reasons(error.get("errors")) or reason)
        if code == _NO_ROOM:
            reason += "; start the server with a larger max_concurrent_envs"
        raise Unscorable(f"{self._url} failed in a {kind} ({code}): {reason}")

    @asynccontextmanager
    async def _answering(self, where: str) -> AsyncIterator[None]:
        """Make what keeps the server from answering nobody's fault."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise Unscorable(f"{where} did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, aiohttp.WSMessageTypeError, OSError) as error:
            raise Unscorable(f"{where} is not there, or has gone: {error}") from error
        except msgspec.MsgspecError as error:
            raise Unscorable(f"{where} answered something else: {error}") from error


def _reasons(errors: Any) -> str:
    """Return pydantic's list of what is wrong with an action as words; empty where it is none."""
    if not isinstance(errors, list):
        return ""
    found = []
    for error in errors:
        if isinstance(error, Mapping):
            place = ".".join(map(str, error.get("loc") or ()))
            found.append(f"{place}: {error.get('msg')}"[:_LONGEST_REASON])
    return "; ".join(found)
