"""An environment from outside of the package, by its name in a recipe alone."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from grpo_megatron.environments.protocol import Reply, ToolCall, Unscorable
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "custom_environment:Warehouse"
PROBLEM = Problem("bolts, nuts", "")


@pytest.fixture(autouse=True)
def in_the_directory_of_the_examples(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(EXAMPLES)


def look_up(item):
    return Reply("", (ToolCall("pieces", {"item": item}),))


async def counted(environment, seed):
    """Both numbers, as the tool gives them."""
    await environment.reset(PROBLEM, seed)
    numbers = []
    for item in ("bolts", "nuts"):
        step = await environment.step(look_up(item))
        numbers.append(int(step.messages[0]["content"]))
    return numbers


@pytest.mark.parametrize(("error", "reward"), [(0, 1.0), (1, 0.0)])
def test_the_sum_is_scored(error, reward):
    async def episode():
        environment = bind(NAME, {"most_pieces": 9}).make()
        numbers = await counted(environment, seed=1)
        assert max(numbers) <= 9
        return await environment.step(Reply(f"Together {sum(numbers) + error}"))

    last = asyncio.run(episode())
    assert last.done and last.outcome.reward == reward


def test_a_seed_decides_the_stock():
    stocks = []
    for seed in (1, 1, 2, 3, 4):
        stocks.append(asyncio.run(counted(bind(NAME, {}).make(), seed)))
    assert stocks[0] == stocks[1]
    assert len({tuple(stock) for stock in stocks}) > 1


def test_an_unknown_item_is_told():
    async def episode():
        environment = bind(NAME, {}).make()
        await environment.reset(PROBLEM, 1)
        return await environment.step(look_up("screws"))

    step = asyncio.run(episode())
    assert "there is no 'screws'; items: bolts, nuts" in step.messages[0]["content"]


def test_a_row_without_items_is_unscorable():
    environment = bind(NAME, {}).make()
    with pytest.raises(Unscorable, match="fewer than two items"):
        asyncio.run(environment.reset(Problem("bolts", ""), 1))


def test_a_wrong_argument_is_refused():
    with pytest.raises(EpisodeError, match="did you mean 'most_pieces'"):
        bind(NAME, {"most_peices": 9})
