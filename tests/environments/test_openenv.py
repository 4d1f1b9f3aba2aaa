"""Environments of an OpenEnv server: its library where OPENENV_PYTHON names a Python that has it,
and a server that speaks as it does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.environments.openenv_actions import form_of
from grpo_megatron.environments.protocol import Reply, ToolCall, Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem
from tests.environments.openenv_tasks import Guess
from tests.environments.test_host import domain, hosted
from tests.environments.test_tools import play

ROOT = Path(__file__).parents[2]
LIBRARY = os.environ.get("OPENENV_PYTHON", "")
SERVERS = ["stand_in"]
if LIBRARY:
    SERVERS.append("library")


@pytest.fixture(scope="module", params=SERVERS)
def serve(request):
    """Start a server with a task; returns its address. Those that live on are used again."""
    started = {}
    python = LIBRARY if request.param == "library" else sys.executable
    command = [python, "-m", "tests.environments.openenv_server", request.param]

    def start(task, max_sessions=4):
        key = (task, max_sessions)
        if key not in started or started[key][0].poll() is not None:
            server = subprocess.Popen(
                [*command, task, str(max_sessions)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            started[key] = server, f"http://127.0.0.1:{int(server.stdout.readline())}"
        return started[key][1]

    yield start
    for server, _ in started.values():
        server.kill()
        server.wait()
        server.stdout.close()


def opened(url, **arguments):
    return bind("openenv", {"url": url, "timeout_s": 20.0, **arguments}).make()


def problem(question, **metadata):
    """Episodes of different tests are no group: their questions differ."""
    return Problem(question, "", metadata)


def number_of(seed, largest=9):
    task = Guess()
    task.reset(seed, largest)
    return str(task._number)


def others(number):
    return [str(guess) for guess in range(1, 10) if str(guess) != number]


def call(name, **arguments):
    return Reply("", (ToolCall(name, arguments),))


@pytest.mark.skipif(
    not LIBRARY, reason="OPENENV_PYTHON names no Python that has the package openenv"
)
def test_the_library_serves_too():
    assert "library" in SERVERS


def test_turns_are_the_one_text_of_an_action(serve):
    number = number_of(7)
    replies = [Reply(others(number)[0]), Reply(others(number)[1]), Reply(number)]
    begun, *steps = play(opened(serve("guess")), *replies, problem=problem("Guess."), seed=7)
    assert begun.messages == ({"role": "user", "content": "Guess.\n\nA number from 1 to 9."},)
    assert begun.tools == ()
    assert [step.reward for step in steps] == [-0.25, -0.25, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].messages == ({"role": "user", "content": "wrong"},)
    assert steps[2].messages == ()
    assert [step.outcome.reward for step in steps] == [-0.25, -0.5, 0.5]
    assert steps[2].outcome.metrics == {"actions": 3, "refused_actions": 0}


def test_the_outcome_may_be_the_last_reward(serve):
    number = number_of(7)
    replies = [Reply(others(number)[0]), Reply(number)]
    environment = opened(serve("guess"), outcome="last")
    assert play(environment, *replies, problem=problem("last"), seed=7)[-1].outcome.reward == 1


def test_recipe_row_and_seed_say_how_an_episode_begins(serve):
    url = serve("guess")
    of_recipe = play(opened(url, reset={"largest": 20}), problem=problem("recipe"))[0]
    of_row = play(opened(url, reset={"largest": 20}), problem=problem("row", reset={"largest": 5}))
    assert of_recipe.messages[0]["content"].endswith("A number from 1 to 20.")
    assert of_row[0].messages[0]["content"].endswith("A number from 1 to 5.")
    with pytest.raises(Unscorable, match="the row's 'reset' is no table"):
        play(opened(url), problem=problem("no table", reset=5))


def test_an_action_that_is_none_is_told(serve):
    steps = play(opened(serve("guess")), Reply(""), Reply("x"), problem=problem("none"))[1:]
    assert steps[0].messages[0]["content"].startswith("error: message: String should have at least")
    assert math.isnan(steps[0].reward)
    assert steps[1].outcome.metrics == {"actions": 1, "refused_actions": 1}


def test_actions_of_several_fields_are_calls(serve):
    replies = [call("act", row=1, column=2), call("act", row=3, column=3, colour="blue")]
    begun, first, second = play(opened(serve("paint")), *replies, problem=problem("paint"))
    (tool,) = begun.tools
    assert tool["function"]["name"] == "act"
    assert tool["function"]["description"] == "Paint a field of the board."
    assert list(tool["function"]["parameters"]["properties"]) == ["row", "column", "colour"]
    assert tool["function"]["parameters"]["required"] == ["row", "column"]
    assert first.messages[0]["role"] == "tool"
    assert first.messages[0]["content"] == '{"board": ["red 1 2"], "moves": 1}'
    assert second.messages[0]["content"] == '{"board": ["red 1 2", "blue 3 3"], "moves": 2}'
    assert second.outcome.reward == 1.0


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call("act", row=1), "argument 'column' is missing"),
        (call("act", row=1, colum=2, column=1), "did you mean 'column'"),
        (call("act", row=1, column="2"), "must be of type integer"),
        (call("act", row=1, column=7), "column: Input should be less than or equal to 3"),
        (call("paint", row=1, column=2), "there is no tool 'paint'"),
        (Reply("", error="no JSON"), "no JSON"),
    ],
)
def test_a_wrong_call_is_told_and_changes_nothing(serve, reply, words):
    good = call("act", row=1, column=1)
    wrong, right = play(opened(serve("paint")), reply, good, problem=problem(words))[1:]
    assert wrong.messages[0]["content"].startswith("error: ")
    assert words in wrong.messages[0]["content"]
    assert right.messages[0]["content"] == '{"board": ["red 1 1"], "moves": 1}'
    assert right.outcome.metrics == {"actions": 1, "refused_actions": 1}


def test_calls_of_a_turn_follow_one_another_to_the_end(serve):
    calls = [ToolCall("act", {"row": row, "column": 1}) for row in (1, 2, 3, 1)]
    step = play(opened(serve("paint")), Reply("", tuple(calls)), problem=problem("four"))[-1]
    assert step.done and step.reward == step.outcome.reward == 1.5
    assert step.outcome.metrics == {"actions": 3, "refused_actions": 0}


def test_a_turn_without_a_call_ends_the_episode(serve):
    replies = [call("act", row=1, column=1), Reply("enough")]
    step = play(opened(serve("paint")), *replies, problem=problem("enough"))[-1]
    assert step.done and step.outcome.reward == 0.5 and math.isnan(step.reward)


def test_fields_are_chosen(serve):
    environment = opened(serve("paint"), action={"column": 2}, observation=["moves"])
    begun, step = play(environment, call("act", row=3), problem=problem("chosen"))
    assert list(begun.tools[0]["function"]["parameters"]["properties"]) == ["row", "colour"]
    assert step.messages[0]["content"] == '{"moves": 1}'


def test_a_text_field_is_chosen(serve):
    environment = opened(serve("paint"), action={"column": 2, "row": 1}, text_field="colour")
    step = play(environment, Reply("green"), problem=problem("green"))[-1]
    assert step.messages[0]["content"] == '{"board": ["green 1 2"], "moves": 1}'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text_field": "color"}, "actions of the server have no field 'color'"),
        ({"action": {"rows": 1}}, "actions of the server have no field 'rows'"),
        ({"observation": ["bord"]}, "observations of the server have no field 'bord'"),
    ],
)
def test_fields_that_there_are_not(serve, arguments, words):
    with pytest.raises(EpisodeError, match=words) as caught:
        play(opened(serve("paint"), **arguments), problem=problem(words))
    assert "did you mean" in caught.value.remedy


def test_tools_of_the_server(serve):
    replies = [call("add", a=2, b=3), call("fail", text="no such thing"), call("ad", a=1, b=2)]
    begun, *steps = play(opened(serve("tools")), *replies, problem=problem("tools"))
    assert [tool["function"]["name"] for tool in begun.tools] == ["add", "fail"]
    assert begun.tools[0]["function"]["description"] == "Add two whole numbers."
    assert begun.messages == ({"role": "user", "content": "tools"},)
    contents = [step.messages[0]["content"] for step in steps]
    assert contents[0] == "5"
    assert contents[1].startswith("error: ") and "no such thing" in contents[1]
    assert contents[2].startswith("error: there is no tool 'ad'; did you mean 'add'")
    assert steps[2].outcome.metrics["refused_actions"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("crash", r"failed in a step \(EXECUTION_ERROR\): out of order"), ("leave", "has gone")],
)
def test_a_server_that_fails_is_nobodys_fault(serve, text, words):
    with pytest.raises(Unscorable, match=words):
        play(opened(serve("guess", 3)), Reply(text), problem=problem(text))


def test_a_server_that_hangs_is_nobodys_fault(serve):
    with pytest.raises(Unscorable, match="did not answer within 1 s"):
        play(opened(serve("guess"), timeout_s=1.0), Reply("hang"), problem=problem("hang"))


def test_a_full_server_says_so(serve):
    url = serve("guess", max_sessions=1)

    async def work(host):
        first = host.environment("d")
        await first.reset(problem("full"), 0)
        second = host.environment("d")
        with pytest.raises(Unscorable, match="larger max_concurrent_envs"):
            await second.reset(problem("full"), 0)
        await second.close()
        await first.close()

    hosted(work, domain("d", "openenv", arguments={"url": url}))


def test_no_server_is_nobodys_fault():
    with pytest.raises(Unscorable, match="is not there"):
        play(opened("http://127.0.0.1:9"), problem=problem("nobody"))


def test_a_server_may_leave_out_the_seed(serve):
    """Which the library does without a word; `rollout.beginnings` finds it."""
    url = serve("unseeded")
    asked = problem("alike")
    begun = [play(opened(url), problem=asked, seed=3)[0].messages for _ in range(2)]
    assert begun[0] != begun[1]


def test_states_are_equal_where_the_actions_were(serve):
    url = serve("guess")
    guesses = others(number_of(5))
    states = []
    for guess in (guesses[0], guesses[1], guesses[0]):
        states.append(play(opened(url), Reply(guess), problem=problem("s"), seed=5)[-1].state)
    assert states[0] == states[2] != states[1]


def test_a_key_goes_along(monkeypatch):
    monkeypatch.setenv("SPACE_KEY", "secret")
    environment = opened("http://127.0.0.1:9", api_key="$SPACE_KEY")
    assert environment._session._headers == {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "url = '127.0.0.1:8000'"),
        ({"url": "http://x", "timeout_s": 0}, "timeout_s = 0"),
        ({"url": "http://x", "outcome": "mean"}, "outcome = 'mean'"),
        ({"url": "http://x", "observation": "text"}, "observation = 'text' are no names"),
        ({"url": "http://x", "text_field": ""}, "text_field = '' is no name"),
        ({"url": "http://x", "reset": 5}, "reset = 5 is no table"),
        ({"url": "http://x", "action": "a"}, "action = 'a' is no table"),
        ({"url": "http://x", "textfield": "a"}, "unexpected keyword argument 'textfield'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(EpisodeError, match=words):
        bind("openenv", arguments)


def test_a_choice_is_no_text():
    schema = {"properties": {"move": {"type": "string", "enum": ["left", "right"]}}}
    assert form_of(schema, None, {}).tools[0]["function"]["name"] == "act"
    assert form_of(schema, "move", {}).action("left") == {"move": "left"}
