"""The door: programs that speak OpenAI's API ask the policy here, and their episodes are recorded.

    POST /v1/chat/completions   messages, tools, max_tokens, stream
    GET /v1/models

A program's key names its session (`conversation_session`). The door is part of the rollout worker
and listens where the worker does: on loopback, or on the network of the job. Its errors have
OpenAI's form; `code` is `episode_over` where a limit of the episode leaves no further turn."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Self

import msgspec
from aiohttp import web

from grpo_megatron.errors import EngineError, GrpoMegatronError
from grpo_megatron.rollout.chat_messages import plain_messages
from grpo_megatron.rollout.chat_protocol import (
    RequestRefused,
    answer_body,
    answer_events,
    error_body,
    models_body,
    read_request,
)
from grpo_megatron.rollout.conversation_session import ConversationSession, EpisodeOver

logger = logging.getLogger(__name__)

LARGEST_BODY = 1 << 23
"""Bytes of a request."""
EPISODE_OVER = "episode_over"
_BAD_REQUEST = "invalid_request_error"
_END_S = 1.0
_MOST_TOLD = 64
_IGNORED_HEADER = "x-ignored-fields"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenSession:
    """A session that a program may ask, by its `key`; `failure` is an error of the engines, which
    is the run's and not the program's."""

    def __init__(self, session: ConversationSession, key: str, url: str):
        self.session = session
        self.key = key
        self.url = url
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """Tell whoever runs the program."""
        if not self.failure.done():
            self.failure.set_exception(error)


class Door:
    """Serves sessions at a free port of `host`; use as `async with`."""

    def __init__(self, host: str):
        self._host = host
        self._sessions: dict[str, OpenSession] = {}
        self._numbers = itertools.count()
        self._told: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Of the API, with its `/v1`; where programs reach it."""

    async def __aenter__(self) -> Self:
        # a program that goes closes its connection, and engines stop sampling for it
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, shutdown_timeout=_END_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}/v1"
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def serving(self, session: ConversationSession) -> Iterator[OpenSession]:
        """Let a program ask the session, which is closed in the end."""
        opened = OpenSession(session, f"sk-{secrets.token_hex(16)}", self.url)
        self._sessions[opened.key] = opened
        try:
            yield opened
        finally:
            del self._sessions[opened.key]
            session.close()
            if opened.failure.done():
                opened.failure.exception()  # seen by who awaited it, or too late for anybody
            else:
                opened.failure.cancel()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=LARGEST_BODY)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/v1/models/{name}", self._model)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer every error in OpenAI's form."""
        try:
            return await handler(request)
        except RequestRefused as error:
            kind = _BAD_REQUEST
            if error.status == 401:
                kind = "authentication_error"
            return _json(error_body(error.message, kind=kind, param=error.param), error.status)
        except EpisodeOver as error:
            body = error_body(str(error), kind=EPISODE_OVER, code=EPISODE_OVER)
            return _json(body, 400)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {LARGEST_BODY >> 20} MiB"
            return _json(error_body(text, kind=_BAD_REQUEST), 413)
        except web.HTTPException as error:
            text = f"{request.method} {request.path} is not served here: {error.reason}"
            return _json(error_body(text, kind=_BAD_REQUEST), error.status)
        except EngineError as error:
            return _json(error_body(error.message, kind="server_error"), 500)
        except GrpoMegatronError as error:
            text = error.message
            if error.where:
                text += f" ({error.where})"
            return _json(error_body(text, kind=_BAD_REQUEST), 400)
        except Exception as error:
            logger.exception("a request of a program failed")
            text = f"{type(error).__name__}: {error}"[:500]
            return _json(error_body(text, kind="server_error"), 500)

    def _session_of(self, request: web.Request) -> OpenSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._sessions.get(key.strip())
        if scheme.lower() != "bearer" or found is None:
            raise RequestRefused("the API key is of no session (any more)", status=401)
        return found

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        return _json(models_body())

    async def _model(self, request: web.Request) -> web.Response:
        self._session_of(request)
        [model] = models_body()["data"]
        return _json({**model, "id": request.match_info["name"]})

    async def _chat(self, http_request: web.Request) -> web.StreamResponse:
        opened = self._session_of(http_request)
        request, ignored = read_request(await http_request.read())
        self._warn_ignored(ignored)
        messages = plain_messages(request.messages)
        try:
            reply = await opened.session.chat(
                messages, request.offered_tools, request.longest, request.stops
            )
        except EngineError as error:
            opened.fail(error)
            raise
        number = f"chatcmpl-{next(self._numbers)}"
        headers = {}
        if ignored:
            headers[_IGNORED_HEADER] = ", ".join(ignored)
        if not request.stream:
            return _json(answer_body(reply, request, number), headers=headers)
        return await _streamed(http_request, answer_events(reply, request, number), headers)

    def _warn_ignored(self, names: list[str]) -> None:
        """Warn about each ignored field once."""
        new = [name for name in names if name not in self._told]
        if new and len(self._told) < _MOST_TOLD:
            self._told.update(new)
            logger.warning(
                "programs ask for %s, which is ignored: replies are sampled as the recipe says",
                ", ".join(new)[:500],
            )


async def _streamed(
    request: web.Request, events: Iterator[bytes], headers: dict[str, str]
) -> web.StreamResponse:
    """Return the whole reply at once, in the form of a stream: it is sampled before it is sent."""
    response = web.StreamResponse(headers=headers)
    response.content_type = "text/event-stream"
    await response.prepare(request)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
