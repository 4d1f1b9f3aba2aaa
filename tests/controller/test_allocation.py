"""Who gets the next samples: priorities, the budget, groups of different sizes through the loop."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.allocation import Allocation, grants, joined, reduction, student_t
from grpo_megatron.controller.group_filter import GroupFilter
from tests.controller.loops import Loop, chance
from tests.controller.scored_groups import group, prompt_of, recipe

TABLE = {  # of printed tables, two-sided 5 %
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    5: 2.5706,
    9: 2.2622,
    10: 2.2281,
    30: 2.0423,
    120: 1.9799,
}


@pytest.mark.parametrize("freedom", TABLE)
def test_students_quantiles_are_those_of_the_tables(freedom):
    assert student_t(0.975, freedom) == pytest.approx(TABLE[freedom], abs=6e-5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 7, 20])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.995])
def test_students_quantile_has_its_mass(probability, freedom):
    """The density, integrated numerically up to the quantile."""
    places = np.linspace(0, student_t(probability, freedom), 200_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    density = scale * (1 + places**2 / freedom) ** (-(freedom + 1) / 2)
    assert 0.5 + np.trapezoid(density, places) == pytest.approx(probability, abs=1e-6)


def test_one_more_sample_narrows_the_half_width():
    found = reduction(np.array([0.5, 0.0]), np.array([4, 4]), 0.05)
    expected = 0.5 * (3.18245 / math.sqrt(4) - 2.77645 / math.sqrt(5))
    assert found == pytest.approx([expected, 0], abs=1e-5)


def by_hand(rewards, count, num_given, most, bonus):
    """The same, sample by sample with numbers of the table (n up to 6)."""
    sizes = [len(of_prompt) for of_prompt in rewards]
    for given_out in range(num_given, num_given + count):
        best = None
        for number, of_prompt in enumerate(rewards):
            n = sizes[number]
            if n >= most:
                continue
            s = np.std(of_prompt, ddof=1)
            narrower = TABLE[n - 1] * s / n**0.5 - TABLE[n] * s / (n + 1) ** 0.5
            priority = narrower + bonus * (math.log(1 + given_out) / n) ** 0.5
            if best is None or priority > best[0] + 1e-9:
                best = (priority, number)
        sizes[best[1]] += 1
    return [size - len(of_prompt) for size, of_prompt in zip(sizes, rewards, strict=True)]


@settings(max_examples=200, deadline=None)
@given(
    rights=st.lists(st.tuples(st.integers(2, 3), st.integers(0, 3)), min_size=1, max_size=5),
    count=st.integers(1, 10),
    bonus=st.sampled_from([0, 0.03, 0.1, 1.0]),
    most=st.integers(3, 5),
)
def test_grants_go_to_the_highest_priorities(rights, count, bonus, most):
    rewards = []
    for size, right in rights:
        rewards.append([1.0] * min(right, size) + [0.0] * (size - min(right, size)))
    num_given = sum(map(len, rewards))
    count = min(count, len(rewards) * most - num_given)
    found = grants(
        np.array([np.std(of_prompt, ddof=1) for of_prompt in rewards]),
        np.array([len(of_prompt) for of_prompt in rewards]),
        count,
        num_given=num_given,
        most=most,
        alpha=0.05,
        bonus=bonus,
    )
    assert found.tolist() == by_hand(rewards, count, num_given, most, bonus)


def test_uncertain_prompts_get_most_and_the_bonus_shares_out():
    deviations, sizes = np.array([0.0, 0.5, 0.0, 0.5]), np.full(4, 4)
    limits = {"num_given": 16, "most": 16, "alpha": 0.05}
    assert grants(deviations, sizes, 16, bonus=0, **limits).tolist() == [0, 8, 0, 8]
    assert grants(deviations, sizes, 16, bonus=100, **limits).tolist() == [4, 4, 4, 4]
    some = grants(deviations, sizes, 16, bonus=0.1, **limits).tolist()
    assert some[1] > some[0] > 0
    assert grants(deviations, sizes, 1, bonus=0, **limits).tolist() == [0, 1, 0, 0]  # a tie


class Rounds:
    """Scored groups of prompts whose numbers of right answers are given, and what was asked for."""

    def __init__(self, config: RunConfig, answer=chance):
        self.answer, self.asked = answer, []
        self.allocation = Allocation(
            config,
            config.allocation,
            ask=self.ask,
            group_filter=GroupFilter(config),
            seeding=None,
        )

    async def ask(self, step, prompts, asked, samples):
        self.asked.append({p.prompt_id: list(s) for p, s in zip(prompts, samples, strict=True)})
        return [
            group([self.answer(step, p, sample) for sample in numbers], name=p.prompt_id)
            for p, numbers in zip(prompts, samples, strict=True)
        ]

    def sample(self, num_prompts, step=0):
        prompts = [prompt_of(f"p{number}") for number in range(num_prompts)]
        return asyncio.run(self.allocation.sample(step, prompts))


@settings(max_examples=150, deadline=None)
@given(
    num_prompts=st.integers(1, 9),
    size=st.integers(3, 8),
    base=st.integers(2, 7),
    per_round=st.one_of(st.none(), st.integers(1, 30)),
    extra=st.integers(0, 8),
    unscored=st.integers(0, 9),
    bonus=st.floats(0, 1),
    step=st.integers(0, 99),
)
def test_the_budget_is_spent_exactly(
    num_prompts, size, base, per_round, extra, unscored, bonus, step
):
    base = min(base, size - 1)

    def answer(step, prompt, sample):
        if int(prompt.prompt_id[1:]) < unscored:
            return np.nan
        return chance(step, prompt, sample)

    config = recipe(
        batch={"num_prompts": num_prompts, "num_samples_per_prompt": size},
        allocation={
            "base_samples_per_prompt": base,
            "samples_per_round": per_round,
            "max_samples_per_prompt": size + extra,
            "bonus": bonus,
        },
    )
    rounds = Rounds(config, answer)
    groups = rounds.sample(num_prompts, step)
    sizes = [len(scored.rewards) for scored in groups]
    assert sum(sizes) == num_prompts * size
    assert min(sizes) >= base and max(sizes) <= size + extra
    names = [scored.group.prompt.prompt_id for scored in groups]
    assert names == [f"p{number}" for number in range(num_prompts)]
    for name, of_group in zip(names, sizes, strict=True):  # every number once, in order
        numbers = [sample for asked in rounds.asked for sample in asked.get(name, [])]
        assert numbers == list(range(of_group))
    for asked in rounds.asked[1:-1]:
        assert sum(map(len, asked.values())) == (per_round or num_prompts)
    metrics = rounds.allocation.take_metrics()
    assert metrics["allocation/rounds"] == len(rounds.asked) - 1
    assert metrics["allocation/group_size_min"] == min(sizes)
    assert metrics["allocation/group_size_max"] == max(sizes)
    again = Rounds(config, answer)
    again.sample(num_prompts, step)
    assert again.asked == rounds.asked


def test_joined_groups_keep_everything_of_their_samples():
    first = group([1, 0], short=[0.5, 0.25], lengths=[3, 4])
    more = group([np.nan], short=[0.125], lengths=[9], truncated=[0])
    more = type(more)(more.group, more.components, more.rewards, (((2, 0.5),),))
    found = joined(first, more)
    assert [len(c.token_ids) for c in found.group.completions] == [3, 4, 9]
    assert found.group.completions[2].truncated
    np.testing.assert_equal(found.components["right"], [1, 0, np.nan])
    np.testing.assert_equal(found.rewards, [1.5, 0.25, np.nan])
    assert found.steps == ((), (), ((2, 0.5),))
    assert joined(first, first).steps == ()


ALLOCATION = {"base_samples_per_prompt": 2, "samples_per_round": 3}


def make(root, crash_at=None, **tables) -> Loop:
    tables = {"num_steps": 6, "checkpoint": {"interval": 2}, "allocation": ALLOCATION} | tables
    return Loop(root, recipe(("p",), **tables), crash_at=crash_at)


def test_a_step_records_and_trains_groups_of_different_sizes(tmp_path):
    loop = make(tmp_path, batch={"num_samples_per_prompt": 4, "num_prompts": 4})
    loop.run()
    seen = set()
    for record, (_, table) in zip(loop.metrics(), loop.trained, strict=True):
        sizes = np.bincount(table.group)
        assert len(table) == 16 == record["batch/num_samples"]
        assert record["allocation/group_size_max"] == sizes.max() <= 8
        assert record["allocation/group_size_min"] == sizes.min() >= 2
        assert record["allocation/rounds"] == 3  # 3 + 3 + 2 samples
        seen |= set(sizes.tolist())
    assert len(seen) > 2


@pytest.mark.parametrize("updates", [2, 3])
def test_updates_have_whole_prompts(tmp_path, updates):
    batch = {"num_samples_per_prompt": 4, "num_prompts": 4, "updates_per_rollout": updates}
    loop = make(tmp_path, batch=batch)
    loop.run()
    for _, table in loop.trained:
        assert set(table.update.tolist()) == set(range(updates))
        for number in range(4):
            assert len(set(table.update[table.group == number].tolist())) == 1


@pytest.mark.parametrize("crash_at", [1, 3])
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"sampling": {"dynamic": True, "max_refill_rounds": 9}},
        {"curriculum": {"rate": 0.5}, "sampling": {"zero_variance": "drop"}},
    ],
)
def test_resumed_equals_uninterrupted(tmp_path, tables, crash_at):
    from tests.controller.loops import Crash

    whole = make(tmp_path / "whole", **tables)
    whole.run()
    loop = make(tmp_path / "cut", crash_at=crash_at, **tables)
    with pytest.raises(Crash):
        loop.run()
    step = max(loop.states, default=0)
    again = make(tmp_path / "cut", **tables)
    if step:
        again.run(loop.states[step])
    else:
        again.run()
    assert again.metrics() == whole.metrics()


def test_dynamic_sampling_refills_with_allocated_groups(tmp_path):
    loop = make(tmp_path, sampling={"dynamic": True, "max_refill_rounds": 9})
    loop.run()
    for record, (_, table) in zip(loop.metrics(), loop.trained, strict=True):
        sums, sizes = np.bincount(table.group, table.reward), np.bincount(table.group)
        assert len(sizes) == 4 and ((sums > 0) & (sums < sizes)).all()
        # whatever was drawn had four samples a prompt
        prompts = record["batch/num_samples"] / 4
        assert prompts == int(prompts) >= 4


def test_retries_and_allocation_go_together(tmp_path):
    loop = make(tmp_path, correction={"max_retry_tokens": 4})
    loop.run()
    records = loop.metrics()
    assert all(record["correction/retries"] > 0 for record in records)
    assert all(len(table) == 16 for _, table in loop.trained)
