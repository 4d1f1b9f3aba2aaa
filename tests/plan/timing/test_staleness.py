"""The simulation of steps in flight: closed forms, and what holds however long things take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from grpo_megatron.plan.timing.staleness import (
    Flow,
    FlowSeconds,
    fitted,
    forecast,
    least_bound,
    slots_of,
    spread_answers,
)

EQUAL = (10.0,) * 16
SECONDS = FlowSeconds(
    token_s=1.0, reward_s=1.0, record_s=0.5, train_s=4.0, publish_s=0.0, after_s=0.25
)
"""A step of equal answers that has engines for itself takes ten seconds."""


def flow(ahead: int, *, waits: bool = False, slots: int = 16, answers=EQUAL) -> Flow:
    at_once = 1
    if ahead > 1 and not waits:
        at_once = 2
    return Flow(ahead, at_once, waits, answers, slots)


def test_without_staleness_a_step_is_the_sum_of_its_phases():
    seconds = replace(SECONDS, publish_s=2.0)
    found = forecast(flow(0, waits=True), seconds)
    assert found.step_s == pytest.approx(10 + 1 + 0.5 + 4 + 2)
    assert (found.mean, found.max, found.sample_mean) == (0, 0, 0)
    assert found.trainer_idle == pytest.approx(1 - 6 / 17.5)
    assert found.engine_idle == pytest.approx(1 - 10 / 17.5)


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
@pytest.mark.parametrize("waits", [False, True])
def test_engines_that_are_faster_go_to_the_bound(ahead, waits):
    found = forecast(flow(ahead, waits=waits), replace(SECONDS, token_s=0.1, publish_s=1.0))
    assert found.mean == pytest.approx(ahead)
    assert found.max == ahead
    assert found.step_s == pytest.approx(4 + 1 + 0.25)


@pytest.mark.parametrize("train_s", [1.0, 4.0, 8.0])
def test_engines_that_are_slower_are_one_training_behind(train_s):
    """One step at a time: tokens of the first `train_s` seconds are a version old."""
    found = forecast(flow(1), replace(SECONDS, train_s=train_s))
    assert found.step_s == pytest.approx(10 + 1 + 0.5)
    assert found.mean == pytest.approx(train_s / 10)
    assert (found.max, found.sample_mean) == (1, 1)
    assert found.engine_idle == pytest.approx(1.5 / 11.5)


@pytest.mark.parametrize("ahead", [2, 8])
def test_two_steps_at_once_leave_no_gap(ahead):
    """Rewards and recording go on beside the next step, and weights come that much later."""
    found = forecast(flow(ahead), SECONDS)
    assert found.step_s == pytest.approx(10)
    assert found.engine_idle == pytest.approx(0)
    assert found.mean == pytest.approx((1 + 0.5 + 4) / 10)


def test_a_publish_that_waits_makes_every_token_a_version_old():
    found = forecast(flow(4, waits=True), replace(SECONDS, publish_s=2.0))
    assert (found.mean, found.max) == (1, 1)
    assert found.step_s == pytest.approx(10 + 1 + 0.5 + 2)


@pytest.mark.parametrize("waits", [False, True])
def test_comparing_log_probs_keeps_the_trainer_busy(waits):
    """With a publish that waits, no step begins meanwhile."""
    seconds = replace(SECONDS, check_s=3.0)
    fast = forecast(flow(1, waits=waits), replace(seconds, token_s=0.1))
    assert fast.step_s == pytest.approx(4 + 3 + 0.25)
    assert fast.trainer_idle == pytest.approx(0.25 / 7.25)
    slow = forecast(flow(2, waits=waits), seconds)
    expected = 10
    if waits:
        expected = 11.5 + 3
    assert slow.step_s == pytest.approx(expected)


def test_a_pause_in_mid_flight_makes_generation_longer():
    found = forecast(flow(1), replace(SECONDS, publish_s=2.0))
    assert found.generation_s == pytest.approx(12)
    assert found.step_s == pytest.approx(12 + 1 + 0.5)


def test_two_steps_at_once_pause_for_every_publish():
    found = forecast(flow(2), replace(SECONDS, publish_s=2.0))
    assert found.step_s == pytest.approx(10 + 2)
    assert found.mean == pytest.approx((1 + 0.5 + 4) / 10)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_weights_come_in_mid_flight_where_training_alone_is_faster(ahead):
    """A checkpoint makes the trainer slower: after four of ten seconds tokens are younger."""
    seconds = replace(SECONDS, publish_s=2.0, check_s=3.0, after_s=9.0)
    found = forecast(flow(ahead), seconds, num_steps=100, window=20)
    assert found.step_s == pytest.approx(4 + 2 + 3 + 9)
    assert found.mean == pytest.approx(ahead - (1 - 4 / 10))


def documented_form(
    ahead: int, waits: bool, sampling_s: float, of: FlowSeconds
) -> tuple[float, float] | None:
    """Seconds of a step and mean staleness, by the table of docs/staleness.md; None: between its
    rows."""
    trains_s = of.train_s
    scoring_s = of.reward_s + of.record_s
    after_s = of.check_s + of.after_s
    trainer_s = trains_s + of.publish_s + after_s
    for trained_s in (trains_s, trains_s + of.after_s):
        for answered_s in (sampling_s, sampling_s + scoring_s):
            if abs(trained_s - answered_s) < 0.01:  # either may be first
                return None
    if ahead == 0:
        return max(sampling_s + scoring_s, after_s) + trains_s + of.publish_s, 0.0
    if waits:
        step_s = sampling_s + scoring_s + of.publish_s + of.check_s
        if trains_s > sampling_s + scoring_s:
            return trainer_s, ahead
        if ahead == 1:
            return step_s + of.after_s, 1.0
        if trains_s + of.after_s < sampling_s + scoring_s:
            return step_s, 1.0
        return None
    engines_s = max(sampling_s + of.publish_s, scoring_s)
    if ahead == 1:
        engines_s = sampling_s + scoring_s
        if trains_s < sampling_s:
            engines_s += of.publish_s
    if trainer_s > 1.05 * engines_s:  # nearer, the chain takes long to fill
        return trainer_s, ahead - max(1 - trains_s / sampling_s, 0.0)
    if trainer_s >= engines_s:
        return None
    if ahead == 1:
        return engines_s, min(trains_s / sampling_s, 1.0)
    if scoring_s + trains_s <= sampling_s:
        return engines_s, (scoring_s + trains_s) / sampling_s
    return None


@settings(max_examples=150, deadline=None)
@given(
    ahead=st.sampled_from([0, 1, 2, 5]),
    waits=st.booleans(),
    token_s=st.floats(0.02, 0.6),
    reward_s=st.floats(0, 1),
    record_s=st.floats(0, 1),
    train_s=st.floats(0.2, 6),
    publish_s=st.floats(0, 1.5),
    check_s=st.floats(0, 1.5),
    after_s=st.floats(0, 2),
)
@example(  # recording a step takes longer than sampling it
    ahead=2,
    waits=False,
    token_s=0.0625,
    reward_s=0.0,
    record_s=1.0,
    train_s=0.25,
    publish_s=0.0,
    check_s=0.0,
    after_s=0.9,
)
def test_the_documented_forms_hold(ahead, waits, **durations):
    waits = waits or ahead == 0
    seconds = FlowSeconds(**durations)
    expected = documented_form(ahead, waits, 10 * seconds.token_s, seconds)
    assume(expected is not None)
    found = forecast(flow(ahead, waits=waits), seconds, num_steps=110, window=20)
    assert (found.step_s, found.mean) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_long_answer_keeps_its_slot():
    """One answer of 40 tokens and fifteen of 4: the others are young, it is what a step lasts."""
    answers = (40.0,) + (4.0,) * 15
    found = forecast(flow(1, answers=answers), replace(SECONDS, train_s=20.0))
    assert found.step_s == pytest.approx(41.5)
    assert found.mean == pytest.approx((20 + 15 * 4) / (40 + 15 * 4))


def test_a_long_answer_that_is_old_outweighs_a_short_one():
    """By tokens, not by samples: the first of two answers is a version old, the second is not."""
    seconds = replace(SECONDS, reward_s=0.0, record_s=0.0, train_s=2.0, after_s=0.0)
    found = forecast(flow(1, slots=1, answers=(2.0, 1.0)), seconds)
    assert found.mean == pytest.approx(2 / 3)
    assert found.sample_mean == pytest.approx(1 / 2)


durations = st.floats(0, 20)


@settings(max_examples=40, deadline=None)
@given(
    ahead=st.integers(0, 6),
    waits=st.booleans(),
    slots=st.integers(1, 40),
    answers=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    token_s=st.floats(0.001, 1),
    reward_s=durations,
    record_s=durations,
    train_s=st.floats(0.001, 20),
    publish_s=durations,
    after_s=durations,
    check_s=durations,
)
def test_bounds_hold_however_long_things_take(ahead, waits, slots, answers, token_s, **others):
    if ahead == 0:
        waits = True
    shape = flow(ahead, waits=waits, slots=slots, answers=tuple(map(float, answers)))
    seconds = FlowSeconds(token_s=token_s, **others)
    found = forecast(shape, seconds, num_steps=16)
    assert 0 <= found.mean <= found.max + 1e-9
    assert 0 <= found.sample_mean <= found.max + 1e-9
    if len(set(answers)) == 1:  # else a long answer that is old may outweigh short ones
        assert found.mean <= found.sample_mean + 1e-9
    assert found.max <= ahead
    assert found.too_old_fraction == 0
    assert 0 <= found.trainer_idle <= 1 and 0 <= found.engine_idle <= 1
    of_trainer = seconds.train_s + seconds.publish_s
    after_s = seconds.check_s + seconds.after_s
    assert found.step_s >= of_trainer * (1 - 1e-9)
    alone_s = shape.makespan * token_s + seconds.reward_s + seconds.record_s
    if ahead == 0:
        expected = max(alone_s, after_s) + of_trainer
        assert found.step_s == pytest.approx(expected)
    else:
        assert found.step_s <= alone_s + of_trainer * 2 + 2 * after_s + 1e-6


@settings(max_examples=20, deadline=None)
@given(
    ahead=st.integers(1, 4),
    waits=st.booleans(),
    slots=st.integers(4, 32),
    token_s=st.floats(0.01, 1),
    train_s=st.floats(1, 20),
)
def test_the_seconds_of_a_token_are_found_again(ahead, waits, slots, token_s, train_s):
    shape = flow(ahead, waits=waits, slots=slots)
    seconds = replace(SECONDS, token_s=token_s, train_s=train_s, publish_s=0.5)
    busy_s = forecast(shape, seconds).generation_s
    again = fitted(shape, [seconds] * 30, [busy_s] * 30, 15)
    assert forecast(shape, again, 30, 15).generation_s == pytest.approx(busy_s, rel=0.1)


def test_single_long_trainings_do_not_make_every_step_stale():
    """Training takes one second, and every fifth time thirty: so does no other step."""
    seconds = [replace(SECONDS, train_s=1.0)] * 4 + [replace(SECONDS, train_s=30.0)]
    found = forecast(flow(1), seconds, 50, 25)
    assert found.mean == pytest.approx((4 * 0.1 + 1) / 5, abs=0.05)
    mean = forecast(flow(1), replace(SECONDS, train_s=6.8), 50, 25).mean
    assert mean == pytest.approx(0.68)


@settings(max_examples=20, deadline=None)
@given(
    ahead=st.integers(1, 5),
    token_s=st.floats(0.01, 2),
    train_s=st.floats(1, 20),
    added_idle=st.floats(0, 0.3),
)
def test_the_least_bound_costs_no_more_than_allowed(ahead, token_s, train_s, added_idle):
    widest = replace(flow(ahead), steps_at_once=min(ahead, 2))
    seconds = replace(SECONDS, token_s=token_s, train_s=train_s)
    found = least_bound(widest, seconds, added_idle)
    assert 1 <= found <= ahead
    lowered_s = forecast(replace(widest, max_staleness=found), seconds).step_s
    fastest_s = forecast(widest, seconds).step_s
    assert 1 - fastest_s / lowered_s <= added_idle + 1e-9
    if found > 1:
        lower_s = forecast(replace(widest, max_staleness=found - 1), seconds).step_s
        assert 1 - fastest_s / lower_s > added_idle


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=200), st.sampled_from([8, 16, 32]))
def test_answers_that_stand_for_all_have_their_mean(lengths, count):
    found = spread_answers(lengths, count)
    assert len(found) == count
    assert sum(found) / count == pytest.approx(sum(lengths) / len(lengths))


def test_slots_are_in_proportion():
    assert slots_of(512, 512) == 32
    assert slots_of(512, 128) == 8
    assert slots_of(512, 1) == 1
    assert slots_of(256, 512) == 64
