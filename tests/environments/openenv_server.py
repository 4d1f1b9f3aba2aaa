"""A server of OpenEnv's protocol: `library|stand_in TASK MAX_SESSIONS`. Prints its port.

`library` needs the package openenv (0.10), which cannot be beside this project's: it wants an older
`mcp`. `stand_in` answers in the same words, as far as the tests go that both must pass."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from typing import Any

from pydantic import ValidationError

from tests.environments.openenv_tasks import BY_NAME, TOOLS

_TOOL_ACTION = {
    "title": "CallToolAction",
    "properties": {"metadata": {}, "type": {}, "tool_name": {}, "arguments": {}},
}


# --- the library's


def library_app(task: str, max_sessions: int) -> Any:
    """Return the application that the library makes of a task."""
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation

    if task == "tools":
        return create_fastapi_app(_tool_class(), CallToolAction, CallToolObservation, max_sessions)
    kind = BY_NAME[task]
    action = _of_library(kind.action)
    observation = type("TaskObservation", (Observation,), {"__annotations__": kind.fields})
    return create_fastapi_app(_class_of(kind, observation), action, observation, max_sessions)


def _of_library(action: Any) -> Any:
    from openenv.core.env_server.types import Action

    return type(action.__name__, (Action, action), {"__doc__": action.__doc__})


def _class_of(kind: Any, observation: Any) -> Any:
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import State

    class Task(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def __init__(self) -> None:
            super().__init__()
            self._task = kind()

        def reset(self, seed: int = 0, largest: int = 9, **_: Any) -> Any:
            given = {"seed": seed, "largest": largest}
            taken = inspect.signature(self._task.reset).parameters
            return self._observed(
                *self._task.reset(**{name: given[name] for name in taken if name in given})
            )

        def step(self, action: Any, **_: Any) -> Any:
            return self._observed(*self._task.step(action))

        def _observed(self, fields: Any, reward: Any, done: bool) -> Any:
            return observation(**fields, reward=reward, done=done)

    return Task


def _tool_class() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.types import Observation, State

    class Task(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def __init__(self) -> None:
            server = FastMCP("task")
            for tool in TOOLS:
                server.tool()(tool)
            super().__init__(server)

        def reset(self, seed: int = 0, **_: Any) -> Any:
            return Observation(done=False, reward=None, metadata={"status": "ready"})

        def _step_impl(self, action: Any, **_: Any) -> Any:
            raise NotImplementedError

    return Task


# --- the stand-in's


class _ToolTask:
    def reset(self, seed: int = 0) -> Any:
        return {}, None, False

    def step(self, action: dict[str, Any]) -> Any:
        if action["type"] == "list_tools":
            return {"tools": [_listed(tool) for tool in TOOLS]}, None, False
        by_name = {tool.__name__: tool for tool in TOOLS}
        called = {"tool_name": action["tool_name"], "result": None, "error": None}
        try:
            text = by_name[action["tool_name"]](**action["arguments"])
            called["result"] = {"content": [{"type": "text", "text": text}], "is_error": False}
        except ValueError as error:
            called["error"] = {"error_type": "execution_error", "message": str(error)}
        return called, None, False


def _listed(tool: Any) -> dict[str, Any]:
    properties = {}
    for name, kind in tool.__annotations__.items():
        if name != "return":
            properties[name] = {"type": {"int": "integer", "str": "string"}[kind]}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": tool.__name__, "description": tool.__doc__, "input_schema": schema}


def stand_in_app(task: str, max_sessions: int) -> Any:
    """Return an application of the same protocol."""
    from aiohttp import web

    sessions: set[Any] = set()

    async def schema(_: Any) -> Any:
        action = _TOOL_ACTION
        if task != "tools":
            action = BY_NAME[task].action.model_json_schema()
        return web.json_response({"action": action, "observation": {}, "state": {}})

    async def serve(request: Any) -> Any:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        if len(sessions) >= max_sessions:
            await connection.send_json(_error("CAPACITY_REACHED", "at capacity"))
            await connection.close()
            return connection
        sessions.add(connection)
        kind = _ToolTask if task == "tools" else BY_NAME[task]
        played = kind()
        try:
            async for message in connection:
                await connection.send_json(await _answer(played, json.loads(message.data)))
        finally:
            sessions.discard(connection)
        return connection

    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", serve)
    return app


async def _answer(task: Any, asked: dict[str, Any]) -> dict[str, Any]:
    data = asked["data"]
    try:
        if asked["type"] == "reset":
            taken = inspect.signature(task.reset).parameters
            told = task.reset(**{name: data[name] for name in data if name in taken})
        else:
            action = data
            if not isinstance(task, _ToolTask):
                action = task.action(**data)
            told = await asyncio.to_thread(task.step, action)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return _error("VALIDATION_ERROR", "Invalid message", errors=errors)
    except Exception as error:
        return _error("EXECUTION_ERROR", str(error))
    fields, reward, done = told
    observation = {**fields, "metadata": {}}
    return {
        "type": "observation",
        "data": {"observation": observation, "reward": reward, "done": done},
    }


def _error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


# --- both


async def _serve(kind: str, task: str, max_sessions: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    if kind == "library":
        import uvicorn

        app = library_app(task, max_sessions)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        print(listening.getsockname()[1], flush=True)
        await server.serve(sockets=[listening])
        return
    from aiohttp import web

    runner = web.AppRunner(stand_in_app(task, max_sessions))
    await runner.setup()
    await web.SockSite(runner, listening).start()
    print(listening.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
