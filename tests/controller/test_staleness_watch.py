"""What a run says of its staleness, from made-up durations."""

from __future__ import annotations

import pytest

from grpo_megatron.controller.staleness_watch import (
    SampledSeconds,
    StalenessWatch,
    TrainedSeconds,
    seen_staleness,
)
from tests.controller.scored_groups import recipe


def watch(ahead: int, pause: str = "keep", *, left_at: int = 0, **batch) -> StalenessWatch:
    batch |= {"num_prompts": 4, "num_samples_per_prompt": 4, "max_staleness": ahead}
    return StalenessWatch(recipe(("p",), batch=batch, publish={"pause": pause}), left_at)


def sampled(generation_s: float) -> SampledSeconds:
    return SampledSeconds(generation_s, reward_s=0.0, record_s=0.0, answers=(8.0,) * 16)


def test_seen_staleness_is_the_mean_of_the_shares():
    shares = {"staleness/0": 0.5, "staleness/3": 0.5, "staleness/0@a": 1.0, "staleness/masked": 9}
    assert seen_staleness(shares) == {"staleness/seen_mean": 1.5, "staleness/seen_max": 3.0}
    assert seen_staleness({"staleness/-1": 1.0})["staleness/seen_mean"] == -1
    assert seen_staleness({}) == {}


@pytest.mark.parametrize(("train_s", "expected"), [(2.0, 0.2), (8.0, 0.8), (20.0, 1.0)])
def test_durations_that_stay_the_same(train_s, expected):
    """Ten seconds of generation: tokens of the first `train_s` are a version old."""
    found = watch(1)
    for _ in range(30):
        metrics = found.metrics(
            {"staleness/0": 1 - expected, "staleness/1": expected},
            sampled(10.0),
            TrainedSeconds(train_s, 0.0, 0.0, 0.0),
        )
        assert metrics["staleness/seen_mean"] == pytest.approx(expected)
    assert metrics["staleness/predicted_mean"] == pytest.approx(expected, abs=0.01)
    assert metrics["staleness/unforeseen"] == pytest.approx(0, abs=0.01)
    assert metrics["idle/predicted_engines"] == pytest.approx(max(1 - 10 / train_s, 0), abs=0.01)


def test_a_prediction_follows_the_newest_steps():
    found = watch(4)
    for _ in range(20):
        slow = found.metrics({}, sampled(10.0), TrainedSeconds(1.0, 0.1, 0.0, 0.1))
    for _ in range(40):
        fast = found.metrics({}, sampled(1.0), TrainedSeconds(10.0, 0.1, 0.0, 0.1))
    assert slow["staleness/predicted_mean"] < 1
    assert fast["staleness/predicted_mean"] == pytest.approx(4)
    assert "staleness/unforeseen" not in fast


def test_the_first_steps_are_younger_than_the_later_ones():
    """The chain fills: what is predicted for the first steps is not what comes in the end."""
    found = watch(4)
    means = []
    for _ in range(25):
        metrics = found.metrics({}, sampled(1.0), TrainedSeconds(10.0, 0.1, 0.0, 0.1))
        means.append(metrics["staleness/predicted_mean"])
    assert means == sorted(means)
    assert means[0] == 0 and means[-1] == pytest.approx(4)


def test_nothing_is_said_without_rollouts_ahead():
    step = (sampled(1.0), TrainedSeconds(1.0, 0.0, 0.0, 0.0))
    assert watch(0, "wait").metrics({"staleness/0": 1.0}, *step) == {}


def test_a_step_that_was_skipped_predicts_nothing():
    empty = SampledSeconds(1.0, 0.0, 0.0, answers=())
    assert watch(1).metrics({}, empty, TrainedSeconds(1.0, 0.0, 0.0, 0.0)) == {}
    assert watch(1).metrics({}, sampled(1.0), TrainedSeconds(0.0, 0.0, 0.0, 0.0)) == {}
    assert watch(1).metrics({}, None, TrainedSeconds(1.0, 0.0, 0.0, 0.0)) == {}


def test_the_bound_is_lowered_to_what_is_needed_and_raised_again():
    """Where training takes much longer, a step ahead suffices. Where sampling takes a little longer
    than training, two steps in the engines at once save what rewards take."""
    found = watch(4, adapt_staleness=True)
    bounds = []
    for _ in range(20):
        metrics = found.metrics({}, sampled(1.0), TrainedSeconds(10.0, 0.1, 0.0, 0.1))
        bounds.append(metrics["staleness/bound"])
    assert bounds[:10] == [4] * 10
    assert sorted(bounds, reverse=True) == bounds and found.bound == 1
    slow_rewards = SampledSeconds(10.0, reward_s=8.0, record_s=0.0, answers=(8.0,) * 16)
    for _ in range(20):
        found.metrics({}, slow_rewards, TrainedSeconds(9.0, 0.1, 0.0, 0.1))
    assert 1 < found.bound <= 4


def test_the_bound_stays_without_the_setting_and_goes_on_where_it_was():
    found = watch(4, left_at=2)
    for _ in range(20):
        metrics = found.metrics({}, sampled(1.0), TrainedSeconds(10.0, 0.1, 0.0, 0.1))
    assert found.bound == 4 and "staleness/bound" not in metrics
    assert watch(4, adapt_staleness=True, left_at=2).bound == 2
    assert watch(4, adapt_staleness=True, left_at=9).bound == 4
    assert watch(4, adapt_staleness=True).bound == 4
