"""Only who has a server's token is answered; what real servers answer is in test_engine.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from grpo_megatron.errors import SetupError
from grpo_megatron.network import Endpoint, carries_token
from grpo_megatron.rollout.plugin.engine_token import VARIABLE, RequireToken

TOKEN = "0123456789abcdef"
RIGHT = [(b"authorization", f"Bearer {TOKEN}".encode())]


def ask(monkeypatch, scope) -> str:
    """Who answers a request: the app, or the guard with which status."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    answered = []

    async def app(scope, receive, send):
        answered.append("app")

    async def send(message):
        if message["type"] != "http.response.body":
            answered.append(message.get("status", message["type"]))

    asyncio.run(RequireToken(app)(scope, None, send))
    [who] = answered
    return who


def http(path: str, headers=(), method: str = "POST"):
    return {"type": "http", "method": method, "path": path, "headers": list(headers)}


@pytest.mark.parametrize(
    "path", ["/pause", "/collective_rpc", "/inference/v1/generate", "/docs", "/metrics", "/unknown"]
)
def test_every_route_needs_the_token(monkeypatch, path):
    assert ask(monkeypatch, http(path)) == 401
    assert ask(monkeypatch, http(path, method="OPTIONS")) == 401
    assert ask(monkeypatch, http(path, RIGHT)) == "app"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"")],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", f"Basic {TOKEN}".encode())],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", f"Bearer {TOKEN}0".encode())],
        [(b"authorization", f"Bearer {TOKEN[:-1]}".encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-token", TOKEN.encode())],
        [*RIGHT, (b"authorization", b"Bearer other")],
    ],
)
def test_what_is_no_token(monkeypatch, headers):
    assert ask(monkeypatch, http("/pause", headers)) == 401


def test_health_is_open_and_nothing_that_looks_like_it(monkeypatch):
    assert ask(monkeypatch, http("/health", method="GET")) == "app"
    for path, method in (("/health", "POST"), ("/health/", "GET"), ("//health", "GET")):
        assert ask(monkeypatch, http(path, method=method)) == 401


def test_sockets_are_closed_and_the_start_is_let_through(monkeypatch):
    socket = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    assert ask(monkeypatch, socket) == "websocket.close"
    assert ask(monkeypatch, socket | {"headers": RIGHT}) == "app"
    assert ask(monkeypatch, {"type": "lifespan"}) == "app"


@pytest.mark.parametrize("token", [None, ""])
def test_a_server_without_a_token_does_not_answer(monkeypatch, token):
    monkeypatch.delenv(VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(VARIABLE, token)
    with pytest.raises(SetupError, match="without a token"):
        RequireToken(None)


def test_tokens_are_compared_whole():
    assert carries_token("bearer  abc", "abc")
    for given in ("", "abc", "Bearer", "Bearer ab", "Bearer abcd", "Bearer \udcff"):
        assert not carries_token(given, "abc")


def test_addresses_do_not_show_their_token(tmp_path):
    file = tmp_path / "rollout-0.json"
    Endpoint("127.0.0.1", 1, TOKEN).write(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Endpoint.read(file).token == TOKEN
    assert TOKEN not in repr(Endpoint.read(file))


@pytest.mark.engine
def test_a_server_that_nobody_gave_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_megatron.rollout.serve", "--model", "/none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert VARIABLE in ended.stderr
