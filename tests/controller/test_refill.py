"""Refill rounds: only kept groups, no prompt twice, caps respected, whatever is rejected."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config.run import SamplingConfig
from grpo_megatron.controller.rollout_batch import fill_batch
from grpo_megatron.data.sampler import PromptSampler
from tests.controller.scored_groups import group, prompt_of


def fill(
    verdicts: str, config: SamplingConfig, target: int, carried=(), acceptance=1.0, num_warm=0
):
    """Fill from one prompt per letter of `verdicts`; "k" prompts give kept groups."""
    prompts = [prompt_of(f"p{index}") for index in range(len(verdicts))]
    sampler = PromptSampler({"d": prompts}, {"d": 1.0}, 0)
    sampler.draw(num_warm)
    asked = []

    def draw(number, exclude):
        asked.append(number)
        return sampler.draw(number, exclude)

    async def score(drawn):
        return [group([1, verdicts[int(p.prompt_id[1:])] == "r"], name=p.prompt_id) for p in drawn]

    def keeps(scored):
        return scored.rewards[1] == 0

    kept, sampled, rounds = asyncio.run(
        fill_batch(
            config,
            target=target,
            acceptance=acceptance,
            carried=carried,
            draw=draw,
            score=score,
            keeps=keeps,
        )
    )
    return kept, sampled, rounds, asked


@settings(max_examples=200, deadline=None)
@given(
    verdicts=st.text("kr", min_size=8, max_size=40),
    target=st.integers(1, 8),
    num_carried=st.integers(0, 3),
    max_rounds=st.integers(0, 5),
    num_warm=st.integers(0, 8),
    oversampling=st.floats(1, 4),
    acceptance=st.floats(0, 1),
)
def test_refill(verdicts, target, num_carried, max_rounds, num_warm, oversampling, acceptance):
    config = SamplingConfig(
        dynamic=True, max_refill_rounds=max_rounds, max_oversampling=oversampling
    )
    carried = [group([1, 0], name=f"p{index}") for index in range(num_carried)]
    kept, sampled, rounds, asked = fill(verdicts, config, target, carried, acceptance, num_warm)
    assert kept[:num_carried] == carried
    assert all(g.rewards[1] == 0 for g in kept)
    ids = [g.group.prompt.prompt_id for g in (*carried, *sampled)]
    assert len(set(ids)) == len(ids)
    assert kept[num_carried:] == [g for g in sampled if g.rewards[1] == 0]
    assert rounds <= 1 + max_rounds
    assert all(number <= math.ceil(target * oversampling) for number in asked)
    if len(kept) < target:  # everything was tried
        assert rounds == 1 + max_rounds or len(ids) == len(verdicts)


def test_rounds_follow_the_acceptance_that_they_see():
    config = SamplingConfig(dynamic=True, max_oversampling=10.0)
    *_, asked = fill("kr" * 60, config, 8, acceptance=0.5)
    assert asked[0] == 16
    *_, asked = fill("r" * 200, config, 2, acceptance=1.0)
    assert asked == [2, 20, 20, 20, 20]  # nothing is kept: as many as allowed


def test_without_dynamic_sampling_there_is_one_exact_round():
    kept, sampled, rounds, asked = fill("kkkkrrrr", SamplingConfig(), 8, acceptance=0.1)
    assert (len(kept), len(sampled), rounds, asked) == (4, 8, 1, [8])


def test_enough_surplus_needs_no_round():
    carried = [group([1, 0], name=f"p{index}") for index in range(3)]
    kept, sampled, rounds, _ = fill("k" * 8, SamplingConfig(dynamic=True), 2, carried)
    assert (kept, sampled, rounds) == (carried, [], 0)


def test_refills_go_on_with_the_other_domains_where_one_is_used_up():
    config = SamplingConfig(dynamic=True, max_oversampling=2.0)
    small = [prompt_of(f"s{index}", "small") for index in range(3)]
    large = [prompt_of(f"l{index}", "large") for index in range(200)]
    weights = {"small": 1.0, "large": 1.0}
    sampler = PromptSampler({"small": small, "large": large}, weights, 0)

    async def score(drawn):
        groups = []
        for prompt in drawn:
            is_kept = int(prompt.prompt_id[1:]) % 2 == 1
            groups.append(group([1, 1 - is_kept], name=prompt.prompt_id, domain=prompt.domain))
        return groups

    def draw(number, exclude):
        prompts = sampler.draw(number, exclude)
        assert len(prompts) == number
        return prompts

    for _ in range(6):
        filled = asyncio.run(
            fill_batch(
                config,
                target=8,
                acceptance=1.0,
                carried=[],
                draw=draw,
                score=score,
                keeps=lambda scored: scored.rewards[1] == 0,
            )
        )
        in_small = sum(one.group.prompt.domain == "small" for one in filled.sampled)
        assert in_small == 3
        assert len(filled.kept) >= 8
