"""Environments behind HTTP: the same episodes, and servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.environments.protocol import Outcome, Reply, ToolCall, Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.environments.remote import RemoteEnvironment
from grpo_megatron.environments.serve import serve
from grpo_megatron.errors import EpisodeError
from grpo_megatron.network import Endpoint
from grpo_megatron.types import Problem
from tests.environments.test_host import HOSTILE, domain, hosted
from tests.environments.test_tools import play

PROBLEM = Problem("begin", "4")
GONE = web.AppKey("gone", asyncio.Event)


@contextlib.asynccontextmanager
async def served(tmp_path, name=f"{HOSTILE}:Obedient", idle_s=3600.0, **settings):
    """A server of this process; its endpoint's file."""
    endpoint = tmp_path / "endpoint.json"
    ready = asyncio.Event()
    config = EnvironmentConfig(name=name, **settings)
    serving = asyncio.create_task(
        serve(
            config,
            address="127.0.0.1",
            endpoint=endpoint,
            idle_s=idle_s,
            log_path=Path(os.devnull),
            said=lambda _: ready.set(),
        )
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield endpoint
    finally:
        waiting.cancel()
        serving.cancel()
        await asyncio.gather(serving, waiting, return_exceptions=True)


def against(work, tmp_path, **options):
    """The result of `work(endpoint)` beside a server."""

    async def run():
        async with served(tmp_path, **options) as endpoint:
            return await work(endpoint)

    return asyncio.run(run())


async def health(endpoint, token=None):
    found = Endpoint.read(endpoint)
    headers = {"Authorization": f"Bearer {found.token if token is None else token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{found.host}:{found.port}/health", headers=headers) as response,
    ):
        return response.status, await response.json()


def test_an_episode_comes_through_as_it_is(tmp_path):
    async def work(endpoint):
        environment = RemoteEnvironment(endpoint=str(endpoint))
        observation = await environment.reset(PROBLEM, 7)
        steps = [await environment.step(Reply(text)) for text in ("go", "nan", "done 0.75")]
        before = await health(endpoint)
        await environment.close()
        await environment.close()
        return observation, steps, before, await health(endpoint)

    observation, (first, second, last), before, after = against(work, tmp_path)
    assert observation.messages[0]["content"] == "Go on. begin 7"
    assert observation.outcome == Outcome(0.25)
    assert first.messages[0]["content"] == "go" and math.isnan(first.reward)
    assert math.isnan(second.outcome.reward)
    assert last.done and last.outcome == Outcome(0.75, {"n": 1.0})
    assert before[1]["episodes"] == 1 and after[1]["episodes"] == 0


async def posted(endpoint, path, body: bytes):
    """(status, answer) of a bare request."""
    found = Endpoint.read(endpoint)
    headers = {"Authorization": f"Bearer {found.token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{found.host}:{found.port}{path}", data=body, headers=headers
        ) as answer,
    ):
        return answer.status, await answer.json()


def test_half_of_a_character_is_no_text_and_refuses_nothing(tmp_path):
    async def work(endpoint):
        begin = {"question": "a\ud800b", "answer": "4", "metadata": {"\udc00": "x"}, "seed": 7}
        begun = await posted(endpoint, "/reset", json.dumps(begin).encode())
        reply = {"text": "1\ud83d", "tool_calls": [], "error": None}
        act = {"episode": begun[1]["episode"], "reply": reply}
        acted = await posted(endpoint, "/step", json.dumps(act).encode())
        refused = await posted(endpoint, "/step", b"[" * 100_000)
        return begun, acted, refused

    begun, acted, refused = against(work, tmp_path)
    assert begun[0] == acted[0] == 200 and refused[0] == 400
    assert begun[1]["observation"]["messages"][0]["content"] == "Go on. a\ufffdb 7"
    assert acted[1]["step"]["messages"][0]["content"] == "1\ufffd"


def test_steps_of_an_episode_that_is_ended_are_answered(tmp_path):
    async def work(endpoint):
        begin = {"question": "begin", "answer": "4", "metadata": {}, "seed": 7}
        episode = (await posted(endpoint, "/reset", json.dumps(begin).encode()))[1]["episode"]
        reply = {"text": "sleep", "tool_calls": [], "error": None}
        act = json.dumps({"episode": episode, "reply": reply}).encode()
        steps = [asyncio.create_task(posted(endpoint, "/step", act)) for _ in range(2)]
        await asyncio.sleep(0.5)
        closed = await posted(endpoint, "/close", json.dumps({"episode": episode}).encode())
        async with asyncio.timeout(30):
            return closed, await asyncio.gather(*steps)

    (status, _), (running, waiting) = against(work, tmp_path)
    assert status == 200
    assert running == (422, {"reason": "its episode was ended"})
    assert waiting[0] == 404


def test_the_calculator_is_the_same_behind_a_server_and_a_process(tmp_path):
    replies = [Reply("", (ToolCall("calculate", {"expression": "2+2"}, "c"),)), Reply("4")]

    def work_of(endpoint):
        async def work(host):
            environment = host.environment("d")
            found = [await environment.reset(PROBLEM, 3)]
            for reply in replies:
                found.append(await environment.step(reply))
            await environment.close()
            return found

        return hosted(work, domain("d", "remote", arguments={"endpoint": str(endpoint)}))

    async def work(endpoint):
        return await asyncio.to_thread(work_of, endpoint)

    apart = against(work, tmp_path, name="calculator")
    expected = play(bind("calculator", {}).make(), *replies, problem=PROBLEM, seed=3)
    assert repr(apart) == repr(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise on purpose", "it raised ValueError: on purpose"),
        ("exit", "its process ended (exit code 3)"),
        ("sleep", "it took longer than 0.5 s (step_s)"),
    ],
)
def test_what_fails_behind_a_server_is_unscorable(tmp_path, text, reason):
    async def work(endpoint):
        environment = RemoteEnvironment(endpoint=str(endpoint))
        await environment.reset(PROBLEM, 0)
        with pytest.raises(Unscorable) as caught:
            await environment.step(Reply(text))
        await environment.close()
        again = RemoteEnvironment(endpoint=str(endpoint))
        assert (await again.reset(PROBLEM, 0)).messages
        return caught.value.reason

    assert against(work, tmp_path, step_s=0.5) == reason


def test_an_idle_episode_is_ended(tmp_path):
    async def work(endpoint):
        environment = RemoteEnvironment(endpoint=str(endpoint))
        await environment.reset(PROBLEM, 0)
        while (await health(endpoint))[1]["episodes"]:
            await asyncio.sleep(0.05)
        with pytest.raises(Unscorable) as caught:
            await environment.step(Reply("go"))
        return caught.value.reason

    assert "answered 404: there is no such episode" in against(work, tmp_path, idle_s=0.1)


def test_nobody_comes_in_without_the_token(tmp_path):
    async def work(endpoint):
        found = Endpoint.read(endpoint)
        with pytest.raises(Unscorable, match="answered 401"):
            await RemoteEnvironment(url=f"http://{found.host}:{found.port}").reset(PROBLEM, 0)
        return await health(endpoint, token="wrong"), stat.S_IMODE(endpoint.stat().st_mode)

    (status, _), mode = against(work, tmp_path)
    assert status == 401
    assert mode == 0o600


def test_a_server_on_the_network_needs_a_token():
    config = EnvironmentConfig(name="calculator")
    with pytest.raises(EpisodeError, match=r"at 10\.0\.0\.1 needs a token"):
        asyncio.run(serve(config, address="10.0.0.1", log_path=Path(os.devnull)))


def answering(work, handler):
    """The result of `work(url)` beside a server whose every answer is `handler`'s."""

    async def run():
        application = web.Application()
        gone = application[GONE] = asyncio.Event()
        application.router.add_post("/{path}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await work(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        finally:
            gone.set()
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"no JSON", 200, "answered something else"),
        (b'{"episode": 1}', 200, "answered something else"),
        (b'{"episode": "\xff"}', 200, "answered something else|no UTF-8"),
        (b"x" * (9 << 20), 200, "more than 8 MiB"),
        (b"gone", 502, "answered 502: gone"),
        (b'{"reason": "no such thing"}', 404, "answered 404: no such thing"),
        (b'{"reason": "the world ended"}', 422, "^the world ended$"),
    ],
)
def test_a_server_that_answers_nonsense(body, status, words):
    async def handler(_):
        return web.Response(body=body, status=status)

    async def work(url):
        with pytest.raises(Unscorable, match=words):
            await RemoteEnvironment(url=url).reset(PROBLEM, 0)

    answering(work, handler)


def test_a_server_that_does_not_answer():
    async def handler(request):
        await request.app[GONE].wait()

    async def work(url):
        with pytest.raises(Unscorable, match="/reset: "):
            await RemoteEnvironment(url=url, timeout_s=0.2).reset(PROBLEM, 0)

    answering(work, handler)


def test_a_server_that_is_not_there():
    with pytest.raises(Unscorable, match=r"http://127\.0\.0\.1:9/reset: "):
        asyncio.run(RemoteEnvironment(url="http://127.0.0.1:9").reset(PROBLEM, 0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one of url and endpoint"),
        ({"url": "http://x", "endpoint": "y"}, "exactly one of url and endpoint"),
        ({"url": "127.0.0.1:80"}, "url = '127.0.0.1:80'"),
        ({"url": "http://"}, "url = 'http://'"),
        ({"url": "http://x", "timeout_s": "5"}, "timeout_s = '5'"),
        ({"url": "http://x", "timeout_s": -1}, "timeout_s = -1"),
        ({"endpoint": "y", "timeout_s": math.inf}, "timeout_s = inf"),
    ],
)
def test_what_reaches_no_server_is_refused(arguments, words):
    with pytest.raises(EpisodeError, match=words):
        bind("remote", arguments)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(tmp_path, ending):
    """Also as a background job of a shell, which starts it with SIGINT ignored."""
    endpoint = tmp_path / "endpoint.json"
    arguments = json.dumps({"largest": 1})
    command = [sys.executable, "-m", "grpo_megatron.environments.serve", "guess_number"]
    command += ["--arguments", arguments, "--endpoint", str(endpoint)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        assert server.stdout.readline().startswith("guess_number at http://127.0.0.1:")
        steps = play(RemoteEnvironment(endpoint=str(endpoint)), Reply("1"), problem=PROBLEM)
        assert steps[-1].outcome.reward == 1
    finally:
        server.send_signal(ending)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["calculater"], 12, "did you mean 'calculator'"),
        (["calculator", "--arguments", "{"], 2, "error"),
        (["calculator", "--arguments", "[1]"], 2, "'[1]' is no object"),
        (["calculator", "--processes", "0"], 2, "'0' is no whole number from 1 on"),
        (["calculator", "--memory-mib", "x"], 2, "'x' is no whole number from 128 on"),
        (["calculator", "--observation-characters", "15"], 2, "from 16 on"),
        (["calculator", "--step-s", "0"], 2, "'0' is no number of seconds"),
        (["calculator", "--step-s", "inf"], 2, "'inf' is no finite number"),
        (["calculator", "--port", "99999"], 2, "'99999' is no port from 0 to 65535"),
        (["calculator", "--port", "-5"], 2, "'-5' is no port"),
        (["calculator", "--idle-s", "nan"], 2, "'nan' is no number of seconds"),
        (["calculator", "--idle-s", "x"], 2, "'x' is no number of seconds"),
        (["calculator", "--endpoint", "/no/such/e"], 3, "endpoint's file cannot be written"),
        (["calculator", "--log", "/no/such/log"], 3, "/no/such/log"),
        (
            ["calculator", "--address", "192.0.2.1", "--endpoint", "/no/such/e"],
            3,
            "cannot listen at 192.0.2.1:0",
        ),
        (["python", "--step-s", "3"], 12, "timeout_s = 4 is not below step_s"),
    ],
)
def test_the_command_says_what_is_wrong(options, code, words):
    command = [sys.executable, "-m", "grpo_megatron.environments.serve", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and words in done.stderr
    assert "Traceback" not in done.stderr and "pydantic" not in done.stderr


def test_the_command_cuts_messages_where_it_is_told(tmp_path):
    """Beside the limit of the recipe that plays there."""
    endpoint = tmp_path / "endpoint.json"
    command = [sys.executable, "-m", "grpo_megatron.environments.serve", f"{HOSTILE}:Obedient"]
    command += ["--endpoint", str(endpoint), "--observation-characters", "30000"]
    server = subprocess.Popen([*command, "--memory-mib", "1024"], stdout=subprocess.PIPE, text=True)
    try:
        assert "http://127.0.0.1:" in server.stdout.readline()
        steps = play(RemoteEnvironment(endpoint=str(endpoint)), Reply("x" * 40000), problem=PROBLEM)
        assert "[… 10000 characters left out …]" in steps[-1].messages[0]["content"]
    finally:
        server.terminate()
        server.wait()
