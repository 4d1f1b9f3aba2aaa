"""Games: states, moves, and that a seed decides them."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.environments.games import GuessNumber, LightsOut
from grpo_megatron.environments.protocol import Reply
from grpo_megatron.types import Problem
from tests.environments.test_tools import play

PROBLEM = Problem("Play.", "")


def solution(state: str) -> list[tuple[int, int]]:
    """The presses that switch all lights off, found by trying all of them."""
    size = len(state.split("/"))
    places = list(itertools.product(range(1, size + 1), repeat=2))
    for count in range(len(places) + 1):
        for presses in itertools.combinations(places, count):
            lit = {
                (row, column)
                for row, cells in enumerate(state.split("/"), start=1)
                for column, cell in enumerate(cells, start=1)
                if cell == "1"
            }
            for row, column in presses:
                for place in places:
                    if abs(place[0] - row) + abs(place[1] - column) <= 1:
                        lit ^= {place}
            if not lit:
                return list(presses)
    raise AssertionError(f"{state} cannot be solved")


@given(st.integers(0, 10**9), st.integers(2, 3), st.data())
def test_every_board_can_be_won(seed, size, data):
    num_presses = data.draw(st.integers(1, size * size))
    game = LightsOut(size=size, num_presses=num_presses, max_moves=20)

    async def episode():
        state = (await game.reset(PROBLEM, seed)).state
        presses = solution(state)
        assert presses, "a board begins with lights on"
        steps = []
        for row, column in presses:
            steps.append(await game.step(Reply(f"press {row} {column}")))
        return steps

    steps = asyncio.run(episode())
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1].outcome.reward == 1
    assert set(steps[-1].state) <= {"0", "/"}


def test_a_press_switches_a_light_and_its_neighbours():
    corner = Reply("I press 1 1")
    observation, first, second = play(LightsOut(size=3), corner, corner, problem=PROBLEM)
    changed = [a != b for a, b in zip(observation.state, first.state, strict=True)]
    assert changed == [True, True, False, False, True] + [False] * 6
    assert second.state == observation.state
    assert first.messages[0]["content"].replace("\n", "/").replace(" ", "") == first.state


@pytest.mark.parametrize("text", ["", "press 4 1", "press 0 2", "press 1", "I give up"])
def test_what_is_no_move_changes_nothing(text):
    game = LightsOut(size=3, invalid_penalty=0.5)
    observation, step = play(game, Reply(text), problem=PROBLEM)
    assert step.state == observation.state
    assert step.reward == -0.5
    assert "no move" in step.messages[0]["content"]
    assert step.outcome.metrics == {"moves": 1, "invalid_moves": 1}


def test_a_game_ends_with_its_moves():
    steps = play(LightsOut(max_moves=2), Reply(""), Reply(""), problem=PROBLEM)[1:]
    assert [step.done for step in steps] == [False, True]
    assert steps[-1].outcome.reward == 0 and steps[-1].messages == ()


@pytest.mark.parametrize("text", ["-7", "is it −7?", "3 or -7", "(-7)"])
def test_a_negative_number_is_no_guess(text):
    observation, step = play(GuessNumber(), Reply(text), problem=PROBLEM)
    assert "no guess" in step.messages[0]["content"]
    assert step.state == observation.state


@pytest.mark.parametrize("text", ["- 7", "guess no. 7", "0-7", "a-7", "7.", "-3 or 7"])
def test_a_dash_is_no_minus(text):
    step = play(GuessNumber(), Reply(text), problem=PROBLEM)[-1]
    assert step.messages[0]["content"].startswith("7 is too")


@pytest.mark.parametrize("text", ["press -1 2", "press 1 -2", "2 -1 2"])
def test_a_negative_number_is_no_place(text):
    step = play(LightsOut(), Reply(text), problem=PROBLEM)[-1]
    assert "no move" in step.messages[0]["content"]


def test_a_place_may_be_written_with_a_dash():
    written = [play(LightsOut(), Reply(text), problem=PROBLEM)[-1] for text in ("1-2", "1 2")]
    assert written[0].state == written[1].state


@given(st.integers(0, 10**9), st.integers(1, 1000))
def test_halving_the_interval_finds_the_number(seed, largest):
    game = GuessNumber(largest=largest, max_moves=10)

    async def episode():
        state = (await game.reset(PROBLEM, seed)).state
        for _ in range(10):
            low, high = map(int, state.split("-"))
            step = await game.step(Reply(f"Maybe {(low + high) // 2}?"))
            if step.done:
                return step
            state = step.state
        return step

    last = asyncio.run(episode())
    assert last.outcome.reward == last.reward == 1


def test_guesses_are_told_where_they_lie():
    replies = [Reply("not a number"), Reply("1"), Reply("100"), Reply("0")]
    observation, *steps = play(GuessNumber(), *replies, problem=PROBLEM, seed=3)
    assert observation.state == "1-100"
    assert [step.state for step in steps] == ["1-100", "2-100", "2-99", "2-99"]
    told = [step.messages[0]["content"] for step in steps]
    assert "no guess" in told[0] and "too low" in told[1]
    assert "too high" in told[2] and "no guess" in told[3]


@pytest.mark.parametrize(("make", "move"), [(LightsOut, "press 1 2"), (GuessNumber, "50")])
def test_a_seed_decides_the_episode(make, move):
    replies = [Reply(move), Reply(move)]
    assert play(make(), *replies, seed=5) == play(make(), *replies, seed=5)
    beginnings = {repr(play(make(), *replies, seed=seed)[1:]) for seed in range(20)}
    assert len(beginnings) > 1


def test_the_rules_stand_below_the_question():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Game 7."}]
    [observation] = play(LightsOut(), problem=Problem("Game 7.", "", {"messages": messages}))
    assert observation.messages[0] == messages[0]
    assert observation.messages[1]["content"].startswith("Game 7.\n\nThe 3 x 3 board")
