"""Environments of the library `verifiers`, whose own loop runs the episode."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.environments.protocol import Reply, ToolCall, Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.environments.verifiers_adapter import VerifiersEnvironment, write_rows
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem
from tests.environments.test_tools import play

verifiers = pytest.importorskip(
    "verifiers", reason="the package verifiers is not installed (extra `agents`)"
)

EXAMPLES = "tests.environments.verifiers_examples"
PROBLEM = Problem("How much is 1 + 1?", "2")


def environment(name, **arguments):
    return VerifiersEnvironment(environment=f"{EXAMPLES}:{name}", arguments=arguments)


def test_an_episode_with_tools():
    call = Reply("I add.", (ToolCall("add", {"a": 1, "b": 1}, "call-7"),))
    observation, step, last = play(environment("with_tools"), call, Reply("2"), problem=PROBLEM)
    assert observation.messages == ({"role": "user", "content": PROBLEM.question},)
    [schema] = observation.tools
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    assert step.messages == ({"role": "tool", "content": "2", "tool_call_id": "call-7"},)
    assert last.done and last.outcome.reward == 1
    assert last.outcome.metrics["total_tool_calls"] == 1


def test_an_episode_of_turns():
    steps = play(environment("with_turns"), Reply("3"), Reply("2"), problem=PROBLEM)[1:]
    assert steps[0].messages == ({"role": "user", "content": "3 is wrong."},)
    assert not steps[0].done and steps[1].done
    assert steps[1].outcome.reward == 1


def test_the_library_ends_the_episode_with_its_turns():
    replies = [Reply("3"), Reply("4"), Reply("5")]
    steps = play(environment("with_turns", max_turns=3), *replies, problem=PROBLEM)[1:]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].outcome.reward == 0


def test_states_are_equal_where_histories_are():
    first, second = (play(environment("with_turns"), Reply("3"), problem=PROBLEM) for _ in range(2))
    other = play(environment("with_turns"), Reply("4"), problem=PROBLEM)
    assert first[1].state == second[1].state != other[1].state


def test_an_environment_that_fails_is_unscorable():
    with pytest.raises(Unscorable, match=r"the environment failed: .*the server is away"):
        play(environment("with_turns"), Reply("fail"), problem=PROBLEM)


def test_a_recipe_names_it():
    bound = bind("verifiers", {"environment": f"{EXAMPLES}:with_tools"})
    assert bound.network and bound.make()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"environment": "no-such-environment"}, "cannot make no-such-environment"),
        ({"environment": f"{EXAMPLES}:with_tool"}, "did you mean 'with_tools'"),
        (
            {"environment": f"{EXAMPLES}:with_tools", "arguments": {"turns": 1}},
            "unexpected keyword argument 'turns'",
        ),
        ({"environment": f"{EXAMPLES}:of_groups"}, "scores whole groups"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, words):
    with pytest.raises(EpisodeError, match=words):
        bind("verifiers", arguments)


def test_its_rows_are_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert write_rows(f"{EXAMPLES}:with_tools", path) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[1]["answer"] == "2"
    assert [message["role"] for message in rows[1]["messages"]] == ["system", "user"]
