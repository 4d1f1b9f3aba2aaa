"""Tools of an MCP server, started for each episode."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from grpo_megatron.environments.protocol import Reply, ToolCall, Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem
from tests.environments.test_host import domain, hosted
from tests.environments.test_tools import play

mcp = pytest.importorskip("mcp", reason="the package mcp is not installed (extra `agents`)")
pytestmark = pytest.mark.skipif(
    not hasattr(mcp, "Client"), reason="the package mcp is older than 2 (extra `agents`)"
)

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = {"command": [sys.executable, SERVER]}
PROBLEM = Problem("How much is 2 + 3?", "5")


def call(name, **arguments):
    return Reply("", (ToolCall(name, arguments),))


def test_an_episode_with_the_tools_of_a_server():
    environment = bind("mcp", COMMAND).make()
    observation, step, last = play(environment, call("add", a=2, b=3), Reply("5"), problem=PROBLEM)
    names = [schema["function"]["name"] for schema in observation.tools]
    assert names == ["add", "fail", "refuse", "keep", "leave", "variable"]
    assert observation.tools[0]["function"]["description"] == "Add two whole numbers."
    assert step.messages[0]["content"] == "5"
    assert last.outcome.reward == 1
    assert not [p for p in psutil.Process().children(recursive=True) if SERVER in p.cmdline()]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call("fail", text="no such thing"), "no such thing"),
        (call("refuse", text="invalid arguments"), "invalid arguments"),
        (call("ad", a=1, b=2), "did you mean 'add'"),
        (call("add", a=1), "argument 'b' is missing"),
        (call("add", a=1, b="2"), "argument 'b' must be of type integer"),
    ],
)
def test_a_wrong_call_is_told(reply, words):
    step = play(bind("mcp", COMMAND).make(), reply, problem=PROBLEM)[-1]
    content = step.messages[0]["content"]
    assert content.startswith("error: ") and words in content
    assert step.outcome.metrics["tool_errors"] == 1


def test_a_server_that_has_refused_a_call_answers_the_next():
    replies = [call("refuse", text="no"), call("add", a=2, b=3.0)]
    step = play(bind("mcp", COMMAND).make(), *replies, problem=PROBLEM)[-1]
    assert step.messages[0]["content"] == "5"


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [("PLACE", "here", "here"), ("PLACE", "$KEY", "$KEY"), ("PLACE_KEY", "$KEY", "secret")],
)
def test_variables_reach_the_server(monkeypatch, name, value, found):
    monkeypatch.setenv("KEY", "secret")
    environment = bind("mcp", {**COMMAND, "variables": {name: value}}).make()
    step = play(environment, Reply("", (ToolCall("variable", {"name": name}),)), problem=PROBLEM)[
        -1
    ]
    assert step.messages[0]["content"] == found


def test_states_are_equal_where_the_calls_were():
    states = []
    for value in ("1", "2", "1"):
        environment = bind("mcp", COMMAND).make()
        step = play(environment, call("keep", value=value), problem=PROBLEM)[-1]
        assert step.messages[0]["content"] == "kept"
        states.append(step.state)
    assert states[0] == states[2] != states[1]


def test_a_server_that_goes_is_nobodys_fault():
    with pytest.raises(Unscorable, match=r"the MCP server has gone|Connection closed"):
        play(bind("mcp", COMMAND).make(), call("leave"), problem=PROBLEM)


def test_a_server_that_does_not_begin():
    environment = bind("mcp", {"command": ["/no/such/program"]}).make()
    with pytest.raises(Unscorable, match="no MCP server: FileNotFoundError"):
        play(environment, problem=PROBLEM)


def test_it_works_in_a_process_of_environments():
    async def work(host):
        environment = host.environment("d")
        await environment.reset(PROBLEM, 0)
        step = await environment.step(call("add", a=4, b=5))
        await environment.close()
        other = host.environment("d")
        await other.reset(PROBLEM, 0)
        await other.close()
        return step.messages[0]["content"]

    assert hosted(work, domain("d", "mcp", arguments=COMMAND)) == "9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({**COMMAND, "variables": {"A": 5}}, "variables has A = 5, which is no text"),
        ({**COMMAND, "variables": "A"}, "variables = 'A' is no table"),
        ({"url": "nope"}, "url = 'nope'"),
        ({"url": "http://"}, "url = 'http://'"),
        ({"command": [5]}, "command has 5"),
        ({"command": [""]}, "command has ''"),
        ({"command": ["python", 8]}, "command has 8"),
    ],
)
def test_what_starts_no_server_is_refused(arguments, words):
    with pytest.raises(EpisodeError, match=words):
        bind("mcp", arguments)


@pytest.mark.parametrize("arguments", [{}, {"command": "python"}, {**COMMAND, "url": "http://x"}])
def test_where_the_server_is_must_be_said_once(arguments):
    with pytest.raises(EpisodeError, match="exactly one of command and url"):
        bind("mcp", arguments)
