"""What environments return is checked, and cut where it is too long."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.environments.checks import checked_observation, checked_step, cut
from grpo_megatron.environments.protocol import Observation, Outcome, Step
from grpo_megatron.environments.registry import bind
from grpo_megatron.environments.wire import LONGEST_LINE
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem

SAID = ({"role": "user", "content": "Go on."},)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "reset returned NoneType"),
        ({"messages": []}, "reset returned dict"),
        (Observation(()), "returned no message"),
        (Observation("text"), "messages of reset are str"),
        (Observation((1,)), 'is no {"role"'),
        (Observation(({"role": "user"},)), 'is no {"role"'),
        (Observation(SAID, ({"name": "x"},)), "a tool is no"),
        (Observation(SAID, ({"function": {}},)), "a tool is no"),
        (Observation(SAID, (), 7), "state is int, not str"),
        (Observation(SAID, outcome=0.0), "the outcome is float"),
    ],
)
def test_what_is_no_observation(found, words):
    with pytest.raises(EpisodeError, match=words):
        checked_observation(found, 100)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "step returned NoneType"),
        (Step(), "no message although the episode is not done"),
        (Step(SAID, reward="1"), "reward is str"),
        (Step(SAID, reward=math.inf), "reward is infinite"),
        (Step(SAID, done=1), "done is int, not bool"),
        (Step(SAID, spoilt=None), "spoilt is NoneType"),
        (Step(SAID, state=None), "state is NoneType"),
        (Step(done=True), "the last step has no outcome"),
        (Step(SAID, outcome=1.0), "the outcome is float"),
        (Step(done=True, outcome=Outcome(-math.inf)), "the outcome's reward is infinite"),
        (Step(done=True, outcome=Outcome(1.0, {"a": None})), "metric 'a' is NoneType"),
        (Step(done=True, outcome=Outcome(1.0, {1: 1})), "a metric's name is int"),
    ],
)
def test_what_is_no_step(found, words):
    with pytest.raises(EpisodeError, match=words):
        checked_step(found, 100)


LONG = "a" * LONGEST_LINE
NESTED = {"role": "user", "content": "x", "extra": [{"deep": [LONG]}]}


@pytest.mark.parametrize(
    "found",
    [
        Observation(SAID, state=LONG),
        Observation(SAID, ({"function": {"name": "x", "description": LONG}},)),
        Observation(SAID, outcome=Outcome(0.0, {LONG: 1.0})),
        Step((NESTED,)),
        Step(SAID, state=LONG),
        Step(({"role": "user", "content": "x", "extra": [0] * LONGEST_LINE},)),
        Step(SAID, outcome=Outcome(0.0, {LONG: 1.0})),
    ],
)
def test_what_is_longer_than_a_line_is_refused_before_it_is_one(found):
    check = checked_observation if isinstance(found, Observation) else checked_step
    with pytest.raises(EpisodeError, match=r"its reply has 8\.0 MiB, and may have 8"):
        check(found, 100)


def test_a_long_reply_that_fits_a_line_passes():
    state = "a" * (LONGEST_LINE - 1000)
    assert checked_step(Step(SAID, state=state), 100).state is state


def test_what_is_one_passes():
    outcome = Outcome(1, {"moves": 3})
    step = checked_step(Step(list(SAID), 1, outcome=outcome), 100)
    assert step == Step(SAID, 1.0, outcome=Outcome(1.0, {"moves": 3.0}))
    assert checked_step(Step(spoilt=True), 100).spoilt
    assert math.isnan(checked_step(Step(done=True, outcome=Outcome(math.nan)), 9).outcome.reward)
    assert checked_observation(Observation(SAID), 100) == Observation(SAID)


@given(st.text(max_size=200), st.integers(16, 100))
def test_a_long_text_keeps_its_beginning_and_its_end(text, characters):
    short = cut(text, characters)
    if len(text) <= characters:
        assert short == text
        return
    head, mark, tail = short.partition(f"\n[… {len(text) - characters} characters left out …]\n")
    assert mark and len(head) + len(tail) == characters
    assert text.startswith(head) and text.endswith(tail)


@pytest.mark.parametrize("name", ["calculator", "guess_number"])
def test_messages_of_the_recipe_are_left_as_they_are(name):
    system = {"role": "system", "content": "a" * 200 + "\x0c"}
    asked = {"role": "user", "content": "b" * 200 + "\x0c"}
    problem = Problem("b", "1", {"messages": [system, asked]})
    begun = asyncio.run(bind(name, {}).make().reset(problem, 1))
    found = checked_observation(begun, 100, problem.metadata["messages"])
    assert found.messages[0] == system
    is_changed = name == "guess_number"
    assert (found.messages[1] != asked) == is_changed
    assert ("characters left out" in found.messages[1]["content"]) == is_changed
    apart = checked_observation(begun, 100)
    assert all("characters left out" in message["content"] for message in apart.messages)


def test_messages_are_cut_one_by_one():
    long = {"role": "tool", "content": "a" * 90, "name": "x"}
    step = checked_step(Step((*SAID, long)), 20)
    assert step.messages[0] == SAID[0]
    assert "70 characters left out" in step.messages[1]["content"]
    assert step.messages[1]["name"] == "x"
