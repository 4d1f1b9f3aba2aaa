"""Environments with tools, played by hand: the calculator, and what a call can be wrong in."""

from __future__ import annotations

import asyncio
import math

import pytest

from grpo_megatron.environments.calculator import Calculator
from grpo_megatron.environments.protocol import Reply, ToolCall
from grpo_megatron.environments.tools import (
    ToolEnvironment,
    ToolError,
    check_arguments,
    tool,
    tool_schema,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem

PROBLEM = Problem("What is 37 * 48?", "1776")


class Kinds(ToolEnvironment):
    """A tool with a parameter of each kind."""

    @tool("Describe.", text="any", count="how many", share="of 1", loud="or not")
    async def describe(self, text: str, count: int, share: float, loud: bool = False) -> str:
        return f"{text} {count} {share} {loud}"

    async def score(self, text: str) -> float:
        return math.nan


def play(environment, *replies, problem=PROBLEM, seed=0):
    """The observation and the steps of an episode."""

    async def episode():
        try:
            found = [await environment.reset(problem, seed)]
            for reply in replies:
                found.append(await environment.step(reply))
        finally:
            await environment.close()
        return found

    return asyncio.run(episode())


def calculate(expression, call_id=""):
    return Reply("", (ToolCall("calculate", {"expression": expression}, call_id),))


def test_an_episode_of_the_calculator():
    observation, step, last = play(
        Calculator(), calculate("37 * 48", "call-1"), Reply("It is 1,776.")
    )
    assert observation.messages == ({"role": "user", "content": PROBLEM.question},)
    assert [schema["function"]["name"] for schema in observation.tools] == ["calculate"]
    assert observation.tools[0]["function"]["parameters"]["required"] == ["expression"]
    assert step.messages == (
        {"role": "tool", "name": "calculate", "content": "1776", "tool_call_id": "call-1"},
    )
    assert not step.done and math.isnan(step.reward) and step.outcome.reward == 0
    assert last.done and last.messages == ()
    assert last.outcome.reward == 1
    assert last.outcome.metrics == {"tool_calls": 1, "tool_errors": 0}


@pytest.mark.parametrize(("answer", "reward"), [("1776", 1), ("It is 1777", 0), ("", 0)])
def test_the_last_answer_is_scored(answer, reward):
    assert play(Calculator(), Reply(answer))[-1].outcome.reward == reward


def test_another_reward_scores_the_answer():
    tagged = Calculator(
        reward="grpo_megatron.rewards.functions:exact_match",
        reward_arguments={"answer_tag": "answer"},
    )
    assert play(tagged, Reply("so <answer>1776</answer>."))[-1].outcome.reward == 1


def test_a_row_without_an_answer_cannot_be_scored():
    last = play(Calculator(), Reply("1776"), problem=Problem("?", ""))[-1]
    assert math.isnan(last.outcome.reward)


def test_the_conversation_of_the_recipe_is_taken():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    [observation] = play(Calculator(), problem=Problem("?", "1", {"messages": messages}))
    assert list(observation.messages) == messages


def test_several_calls_of_a_turn_are_answered_in_order():
    both = Reply("", calculate("1 + 1", "a").tool_calls + calculate("2 + 2", "b").tool_calls)
    step = play(Calculator(), both)[-1]
    assert [message["content"] for message in step.messages] == ["2", "4"]
    assert step.outcome.metrics["tool_calls"] == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (calculate("1 +"), "error: this is no arithmetic"),
        (Reply("", (ToolCall("calculat", {}),)), "did you mean 'calculate'?"),
        (Reply("", (ToolCall("calculate", {}),)), "argument 'expression' is missing"),
        (Reply("", (ToolCall("calculate", {"expression": 3}),)), "of type string, not integer"),
        (
            Reply("", (ToolCall("calculate", {"expression": "1", "expresion": "1"}),)),
            "there is no argument 'expresion'",
        ),
        (Reply("<tool_call>", error="the call is no JSON"), "error: the call is no JSON"),
    ],
)
def test_a_wrong_call_is_told_and_counted(reply, words):
    step = play(Calculator(), reply)[-1]
    [message] = step.messages
    assert message["role"] == ("tool" if reply.tool_calls else "user")
    assert words in message["content"]
    assert not step.done
    assert step.outcome.metrics == {"tool_calls": 1, "tool_errors": 1}


def test_a_call_and_a_malformed_one_are_both_answered():
    reply = Reply("", calculate("1 + 1").tool_calls, error="the second call is no JSON")
    [message] = play(Calculator(), reply)[-1].messages
    assert message["role"] == "tool"
    assert message["content"] == "2\n\nerror: the second call is no JSON"


def test_states_are_equal_where_histories_are():
    first, _, other = (play(Calculator(), calculate(text)) for text in ("1+1", "2", "4-1"))
    again = play(Calculator(), calculate("3 - 1"))
    assert first[0].state == again[0].state
    assert first[1].state == again[1].state
    assert first[1].state != other[1].state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"share": 1}, None),
        ({"loud": True}, None),
        ({"count": True}, "'count' must be of type integer, not boolean"),
        ({"count": 1.0}, None),
        ({"count": 1.5}, "'count' must be of type integer, not number"),
        ({"count": math.inf}, "'count' must be of type integer, not number"),
        ({"share": "1"}, "'share' must be of type number, not string"),
        ({"loud": 1}, "'loud' must be of type boolean, not integer"),
        ({"text": None}, "'text' must be of type string, not null"),
        ({"text": ["a"]}, "'text' must be of type string, not array"),
        ({"text": {}}, "'text' must be of type string, not object"),
    ],
)
def test_arguments_are_checked_against_the_schema(change, words):
    arguments = {"text": "a", "count": 2, "share": 0.5} | change
    [schema] = Kinds().tools
    if words is None:
        check_arguments(schema, arguments)
        return
    with pytest.raises(ToolError, match=words):
        check_arguments(schema, arguments)


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "arguments", "words"),
    [
        ({}, {"a": 1}, None),
        ({"type": "object"}, {"a": 1}, None),
        ({"properties": {}}, {"a": 1}, "there is no argument 'a'"),
        ({"properties": {"a": STRING}}, {"b": 1}, "there is no argument 'b'"),
        ({"properties": {"a": True}}, {"a": 1}, None),
        ({"properties": {"a": False}}, {"a": 1}, "there is no argument 'a'"),
        ({"properties": {"a": STRING}, "additionalProperties": True}, {"b": 1}, None),
        ({"properties": {"a": STRING}, "additionalProperties": STRING}, {"b": "1"}, None),
        ({"properties": {"a": STRING}, "additionalProperties": STRING}, {"b": 1}, "type string"),
        ({"additionalProperties": False}, {"a": 1}, "there is no argument 'a'"),
        ({"properties": {"a": STRING}, "patternProperties": {"^b": {}}}, {"b": 1}, None),
        ({"properties": {"a": STRING}, "anyOf": [{"required": ["b"]}]}, {"b": 1}, None),
        ({"required": ["a"]}, {"b": 1}, "argument 'a' is missing"),
    ],
)
def test_what_a_json_schema_allows_is_taken(parameters, arguments, words):
    schema = tool_schema("look", "Look.", parameters)
    if words is None:
        check_arguments(schema, arguments)
        return
    with pytest.raises(ToolError, match=words):
        check_arguments(schema, arguments)


def test_a_method_gets_whole_numbers_as_they_are_annotated():
    arguments = {"text": "a", "count": 2.0, "share": 1}
    step = play(Kinds(), Reply("", (ToolCall("describe", arguments),)))[-1]
    assert step.messages[0]["content"] == "a 2 1 False"


def test_a_parameter_needs_a_type_and_a_description():
    with pytest.raises(EpisodeError, match="parameter 'place' of tool 'time_at'"):

        class Clock(ToolEnvironment):
            @tool("The time.")
            async def time_at(self, place: str) -> str:
                return place
