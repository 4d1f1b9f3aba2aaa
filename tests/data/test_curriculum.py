"""Draws by success rate: weights, mastery, demotion, and states that resume exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config.run import CurriculumConfig
from grpo_megatron.data.curriculum import Curriculum
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import DataError
from tests.data.made_prompts import prompt, prompts

SUCCESSES = st.floats(0, 1)


def make(number: int = 20, **fields) -> Curriculum:
    return Curriculum([f"p{i}" for i in range(number)], "0\0d", CurriculumConfig(**fields))


def master(curriculum: Curriculum, *names: str) -> None:
    for name in names:
        for _ in range(3):
            curriculum.observe(name, 1.0)


@settings(max_examples=100, deadline=None)
@given(
    visits=st.lists(st.tuples(st.integers(0, 19), SUCCESSES), max_size=60),
    count=st.integers(0, 25),
    excluded=st.sets(st.integers(0, 19)),
    drawn=st.integers(0, 10**6),
)
def test_a_draw_has_distinct_prompts_and_none_that_is_excluded(visits, count, excluded, drawn):
    curriculum = make()
    for index, success in visits:
        curriculum.observe(f"p{index}", success)
    out = {f"p{index}" for index in excluded}
    found = curriculum.draw(count, out, drawn)
    assert len(found) == len(set(found)) == min(count, 20 - len(out))
    assert not out & set(found)
    assert sum(curriculum.buckets().values()) == 20


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(SUCCESSES, max_size=8), max_size=10),
    cut=st.integers(0, 10),
    seed=st.integers(0, 3),
)
def test_resumed_equals_uninterrupted(batches, cut, seed):
    def run(sampler, batches):
        drawn = []
        for successes in batches:
            batch = sampler.draw(len(successes))
            more = sampler.draw(2, {p.prompt_id for p in batch})
            drawn.append([p.prompt_id for p in (*batch, *more)])
            assert len(set(drawn[-1])) == len(batch) + 2
            for p, success in zip(batch, successes, strict=True):
                sampler.observe(p, success)
        return drawn

    def sampler():
        train = {"a": prompts(12, "a"), "b": prompts(9, "b")}
        return PromptSampler(train, {"a": 2.0, "b": 1.0}, seed, CurriculumConfig())

    whole, first, second = sampler(), sampler(), sampler()
    expected = run(whole, batches)
    found = run(first, batches[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + run(second, batches[cut:]) == expected
    assert second.state_dict() == whole.state_dict()
    assert second.metrics() == whole.metrics()


def test_draws_follow_the_variance_of_success():
    curriculum = make(2)
    curriculum.observe("p0", 0.5)
    curriculum.observe("p1", 0.0)
    first = [curriculum.draw(1, (), i)[0] for i in range(4000)]
    # weights 0.25 + 0.05 and 0 + 0.05
    assert first.count("p0") / 4000 == pytest.approx(0.30 / 0.35, abs=0.02)


def test_unseen_prompts_are_drawn_alike_and_in_any_order():
    curriculum = make(5)
    places = np.array(
        [
            [draw.index(f"p{i}") for i in range(5)]
            for draw in (curriculum.draw(5, (), n) for n in range(3000))
        ]
    )
    np.testing.assert_allclose(places.mean(0), 2.0, atol=0.15)
    firsts = [curriculum.draw(1, (), n)[0] for n in range(3000)]
    np.testing.assert_allclose([firsts.count(f"p{i}") / 3000 for i in range(5)], 0.2, atol=0.04)


def test_mastery_takes_three_visits_in_a_row():
    curriculum = make(3, rate=1.0)
    for success in (1.0, 1.0, 0.9, 1.0, 0.95):
        curriculum.observe("p0", success)
        assert curriculum.buckets()["mastered"] == 0
    curriculum.observe("p0", 1.0)
    assert curriculum.buckets()["mastered"] == 1


def test_a_mastered_prompt_stays_until_it_falls_below_the_bound():
    curriculum = make(3, rate=1.0)
    master(curriculum, "p0")
    for success in (0.9, 0.8, 1.0):
        curriculum.observe("p0", success)
        assert curriculum.buckets()["mastered"] == 1
    curriculum.observe("p0", 0.79)
    assert curriculum.buckets() == {
        "unseen": 2,
        "frozen": 0,
        "hard": 0,
        "frontier": 1,
        "mastered": 0,
    }
    master(curriculum, "p0")  # three more visits
    assert curriculum.buckets()["mastered"] == 1


def test_mastered_prompts_get_their_replay_share():
    curriculum = make(60)
    master(curriculum, *(f"p{i}" for i in range(20)))
    drawn, replayed = 0, 0
    for _ in range(100):
        found = curriculum.draw(8, (), drawn)
        drawn += len(found)
        replayed += sum(int(name[1:]) < 20 for name in found)
    assert replayed == drawn * 0.05


def test_when_all_else_is_drawn_mastered_prompts_fill_the_batch():
    curriculum = make(6)
    master(curriculum, "p0", "p1", "p2", "p3")
    assert set(curriculum.draw(5, (), 0)) > {"p4", "p5"}
    assert len(curriculum.draw(5, (), 7)) == 5
    assert make(3, replay_share=0.0).draw(2, ("p0",), 0) != []


def test_success_is_a_moving_average():
    curriculum = make(2, rate=0.25)
    for success in (1.0, 0.0, 0.0):
        curriculum.observe("p0", success)  # 1, 0.75, 0.5625
    assert curriculum.buckets()["frontier"] == 1
    for _ in range(3):
        curriculum.observe("p0", 0.0)  # 0.2373
    assert curriculum.buckets()["hard"] == 1
    for _ in range(6):
        curriculum.observe("p0", 0.0)
    assert curriculum.buckets()["frozen"] == 1


def test_the_state_is_small():
    curriculum = make(20000)
    assert len(curriculum.state_dict()) < 2000
    for index in range(4000):
        curriculum.observe(f"p{index}", (index % 9) / 8)
    assert len(curriculum.state_dict()) < 20000


def test_draws_do_not_depend_on_the_order_of_the_data_but_on_seed_and_domain():
    ids = [f"p{i}" for i in range(30)]
    one, other = (Curriculum(order, "0\0d", CurriculumConfig()) for order in (ids, ids[::-1]))
    assert one.draw(10, (), 5) == other.draw(10, (), 5) != one.draw(10, (), 15)
    assert one.draw(10, (), 5) != Curriculum(ids, "1\0d", CurriculumConfig()).draw(10, (), 5)


def test_a_state_with_curriculum_fits_no_run_without():
    train = {"a": [prompt(str(i), "a") for i in range(5)]}
    one = PromptSampler(train, {"a": 1.0}, 0, CurriculumConfig())
    other = PromptSampler(train, {"a": 1.0}, 0)
    for saved, sampler in ((one, other), (other, one)):
        with pytest.raises(DataError, match="curriculum of domain 'a': checkpoint has"):
            sampler.load_state_dict(saved.state_dict())
