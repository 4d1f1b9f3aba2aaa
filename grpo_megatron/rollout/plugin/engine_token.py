"""A rollout server answers only to who has its token.

vLLM's own `--api-key` guards routes that generate and leaves open those that control: `/pause`,
`/sleep`, `/update_weights`, `/collective_rpc` (vLLM 0.32.0, middleware/authenticate.py:11). Here
every route needs the token but `GET /health`, which says nothing but that the server is there."""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from grpo_megatron.errors import SetupError
from grpo_megatron.network import carries_token

VARIABLE = "GRPO_MEGATRON_ENGINE_TOKEN"
"""Hands the token to a server: its environment is readable by its owner only, its command line by
everybody on the machine."""
MIDDLEWARE = f"{__name__}.RequireToken"
"""For vLLM's `--middleware`."""
_OPEN = ("GET", "/health")
_REFUSAL = b'{"error": "this server answers only to its run: the token is missing or wrong"}'

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def own_token() -> str:
    """Return the token of this server. Raises SetupError where it was given none: it must not
    answer then."""
    token = os.environ.get(VARIABLE, "")
    if not token:
        raise SetupError(
            "a rollout server was started without a token",
            where=VARIABLE,
            remedy="set it to a random text, and give the same to `EngineClient(token=...)`",
        )
    return token


class RequireToken:
    """ASGI middleware around a server's routes, its documentation and its metrics included.

    Raises SetupError where there is no token."""

    def __init__(self, app: _App):
        self._app = app
        self._token = own_token()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass on what the token's owner asks; others get status 401."""
        if scope["type"] == "lifespan" or self._may_ask(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_ask(self, scope: _Message) -> bool:
        if (scope.get("method"), scope.get("path")) == _OPEN:
            return True
        given = [text for name, text in scope["headers"] if name == b"authorization"]
        # of several headers it is not said which one counts
        return len(given) == 1 and carries_token(given[0].decode("latin-1"), self._token)
