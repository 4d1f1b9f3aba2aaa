"""pass@k, majority@k and intervals, against enumeration and textbook values."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.gates import result_names
from grpo_megatron.controller.evaluation import Evaluator, _sampled, pass_at_k, wilson
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.types import Prompt, ScoredGroup
from tests.controller.scored_groups import REWARD, group, prompt_of, recipe
from tests.rewards.reward_pools import HOSTILE


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets(correct, k):
    samples = [i < correct for i in range(5)]
    subsets = [any(chosen) for chosen in itertools.combinations(samples, k)]
    assert pass_at_k(5, correct, k) == pytest.approx(np.mean(subsets))


def test_intervals():
    """Newcombe (1998), table 1: 81 of 263, and 0 of 20."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def answered(texts, right, **domain) -> dict[str, float]:
    scored = group(right)
    completions = tuple(
        replace(c, text=text) for c, text in zip(scored.group.completions, texts, strict=True)
    )
    scored = replace(scored, group=replace(scored.group, completions=completions))
    return _sampled(scored, GroupFilter(recipe(d=domain)))


class Scored:
    """In the place of dispatcher and rewards: prompts have the scores that a test gives them.

    greedy, sampled: by prompt, what the accuracy component is of each answer; NaN or None: it
    could not be scored."""

    def __init__(self, greedy, sampled):
        self._greedy, self._sampled = greedy, sampled

    async def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list:
        return [(prompt, self._greedy[prompt.prompt_id]) for prompt in prompts]

    async def rollouts(self, step: int, prompts: Sequence[Prompt], *, num_samples: int) -> list:
        return [(prompt, self._sampled[prompt.prompt_id]) for prompt in prompts]

    async def score(self, answers: list, *, is_counted: bool) -> list[ScoredGroup]:
        assert not is_counted
        return [group(right, name=p.prompt_id, domain=p.domain) for p, right in answers]


def evaluated(prompts: dict[str, str], greedy: dict, sampled: dict | None = None) -> dict:
    """Results. prompts: domain by name."""
    scored = Scored(greedy, sampled)
    domains = tuple(dict.fromkeys(prompts.values()))
    evaluator = Evaluator(
        recipe(domains), dispatcher=scored, rewards=scored, judges=EngineControl([])
    )
    asked = [prompt_of(name, domain) for name, domain in prompts.items()]
    num_samples = 0
    if sampled is not None:
        num_samples = len(next(iter(sampled.values())))
    return asyncio.run(evaluator.evaluate(asked, num_samples))


def test_an_answer_that_could_not_be_scored_is_neither_right_nor_wrong():
    prompts = {"p": "d", "q": "d", "r": "d", "s": "e"}
    found = evaluated(prompts, {"p": [1], "q": [None], "r": [0], "s": [1]})
    assert found["d"]["prompts"] == 3
    assert found["d"]["accuracy"] == 0.5 and found["d"]["accuracy_unscorable"] == 1
    assert (found["d"]["accuracy_low"], found["d"]["accuracy_high"]) == wilson(0.5, 2)
    assert found["e"]["accuracy"] == 1 and found["e"]["accuracy_unscorable"] == 0
    assert found["all"]["prompts"] == 4
    assert found["all"]["accuracy"] == pytest.approx(2 / 3)
    assert found["all"]["accuracy_unscorable"] == 1


def test_where_nothing_could_be_scored_there_is_no_accuracy():
    found = evaluated({"p": "d", "q": "e"}, {"p": [None], "q": [1]})
    assert found["d"] == {"prompts": 1, "accuracy_unscorable": 1}
    assert found["all"]["accuracy"] == 1 and found["all"]["accuracy_unscorable"] == 1
    json.dumps(evaluated({"p": "d"}, {"p": [None]}), allow_nan=False)


def test_pass_at_k_and_majority_are_of_the_samples_that_could_be_scored():
    prompts = {"p": "d", "q": "d", "r": "d"}
    nan = math.nan
    sampled = {"p": [1, 0, nan, 0], "q": [nan, 1, nan, nan], "r": [nan, nan, nan, nan]}
    greedy = {"p": [1], "q": [1], "r": [1]}
    found = evaluated(prompts, greedy, sampled)["d"]
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass_at_1_unscorable"] == 1
    assert found["pass_at_2"] == pytest.approx(pass_at_k(3, 1, 2))  # only p has two of them
    assert found["pass_at_2_unscorable"] == 2
    assert "pass_at_4" not in found and found["pass_at_4_unscorable"] == 3
    assert found["majority_at_1"] == 1 and found["majority_at_1_unscorable"] == 2
    assert found["majority_at_2"] == 1 and found["majority_at_2_unscorable"] == 1
    assert (found["majority_at_4_low"], found["majority_at_4_high"]) == wilson(1.0, 2)


def test_failures_and_none_of_rewards_are_no_wrong_answers():
    """Through the processes that compute rewards."""
    prompts = [prompt_of(name) for name in ("1", "raise", "None", "0", "nan", "exit")]
    config = recipe(d={"rewards": [{"function": f"{HOSTILE}:obey", "name": "right"}]})

    class Dispatcher:
        async def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list:
            groups = [group([0], name=prompt.prompt_id).group for prompt in prompts]
            return [replace(g, completions=_saying(g.prompt.text, g.completions)) for g in groups]

    def _saying(text: str, completions) -> tuple:
        return tuple(replace(completion, text=text) for completion in completions)

    async def run() -> dict:
        async with RewardPool(config.domains) as pool:
            evaluator = Evaluator(
                config, dispatcher=Dispatcher(), rewards=pool, judges=EngineControl([])
            )
            return await evaluator.evaluate(prompts)

    found = asyncio.run(run())["d"]
    assert found["accuracy"] == 0.5 and found["accuracy_unscorable"] == 4


def test_more_than_half_without_a_score_make_an_accuracy_unreliable():
    prompts = {"p": "d", "q": "d", "r": "d", "s": "d"}
    greedy = {"p": [1], "q": [1], "r": [None], "s": [None]}
    scored = Scored(greedy, None)
    evaluator = Evaluator(recipe(), dispatcher=scored, rewards=scored, judges=EngineControl([]))
    asked = [prompt_of(name) for name in prompts]
    found = asyncio.run(evaluator.greedy_accuracy(asked))
    assert found.value == 1 and found.num_unscorable == 2 and found.is_reliable
    assert str(found) == "1.000 (2 of 4 prompts could not be scored)"
    greedy["q"] = [None]
    found = asyncio.run(evaluator.greedy_accuracy(asked))
    assert found.value == 1 and found.num_unscorable == 3 and not found.is_reliable
    assert str(found) == "1.000 (unreliable: 3 of 4 prompts could not be scored)"
    greedy["p"] = [None]
    found = asyncio.run(evaluator.greedy_accuracy(asked))
    assert math.isnan(found.value) and not found.is_reliable
    assert str(found) == "unknown (unreliable: 4 of 4 prompts could not be scored)"


@pytest.mark.parametrize("num_samples", [0, 1, 5, 8])
def test_gates_may_ask_for_what_is_measured(num_samples):
    sampled = None
    if num_samples:
        sampled = {"p": [1] * num_samples}
    measured = evaluated({"p": "d"}, {"p": [1]}, sampled)
    found = {f"eval.{name}.{metric}" for name, values in measured.items() for metric in values}
    config = recipe(evaluation={"num_samples": num_samples})
    assert set(result_names(config)) == found | {"seconds", "steps", "accelerator_hours"}


def test_majority_is_that_of_the_first_k():
    found = answered(["7", "8", "8 ", "7", "7"], [1, 0, 0, 1, 1])
    assert found["majority_at_1"] == 1 and found["majority_at_4"] == 1
    assert found["majority_at_5"] == 1 and found["pass_at_5"] == 1
    assert found["pass_at_1"] == pytest.approx(0.6)
    assert answered(["8", "7", "7", "8", "8"], [0, 1, 1, 0, 0])["majority_at_2"] == 0


def test_the_majority_is_one_of_answers_not_of_thoughts():
    thoughts = ["so <answer>8</answer>", "thus <answer>7</answer>", "hence <answer> 7</answer>"]
    reward = {"function": REWARD, "name": "right", "arguments": {"answer_tag": "answer"}}
    assert answered(thoughts, [0, 1, 1], rewards=[reward])["majority_at_3"] == 1
    boxed = [r"a \boxed{8}", r"b \boxed{7}", r"\boxed{8}, no, \boxed{7} {sic}"]
    assert answered(boxed, [0, 1, 1])["majority_at_3"] == 1
    nested = r"\boxed{\frac{\sqrt{3}}{2}}"
    assert answered([r"\boxed{2}", f"a {nested}", f"b {nested}"], [0, 1, 1])["majority_at_3"] == 1
