"""Rollouts several steps ahead: no token is older than the bound, prompts come in order and once,
and what is in the store is trained by a resume."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.manifest import read_manifest
from grpo_megatron.controller import busy_clock, staleness_watch
from grpo_megatron.controller.busy_clock import BusyClock
from grpo_megatron.controller.recorder import drop_disconnected, steps_in
from grpo_megatron.controller.sampling_chain import SamplingChain
from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.telemetry.metrics import read_metrics
from grpo_megatron.types import VersionSpan
from tests.controller.loops import START, Crash, Loop
from tests.controller.scored_groups import completion, recipe

NUM_STEPS = 8
DYNAMIC = {"dynamic": True, "max_oversampling": 4}


def half(step: int, prompt, sample: int) -> float:
    """Most groups are mixed, so that no step comes to the end of the prompts."""
    return float(derive_seed(step, prompt.prompt_id, sample) % 2)


def make(root, *, ahead: int, pause: str = "keep", crash_at=None, answer=half, **tables) -> Loop:
    batch = {"num_prompts": 4, "num_samples_per_prompt": 4, "max_staleness": ahead}
    batch |= tables.pop("batch", {})
    config = recipe(
        ("p",),
        **{
            "num_steps": NUM_STEPS,
            "checkpoint": {"interval": 3},
            "publish": {"pause": pause},
            "batch": batch,
            **tables,
        },
    )
    loop = Loop(root, config, answer, 200, crash_at)
    told_apart = []  # in the store
    for number, prompt in enumerate(loop.prompts["p"]):
        told_apart.append(replace(prompt, token_ids=(1, number)))
    loop.prompts["p"] = told_apart
    return loop


def prompts_by_step(loop: Loop) -> dict[int, list[int]]:
    """The prompts of every step that was trained, in the order of its groups."""
    found = {}
    for _, table in loop.trained:
        of_groups = {}
        for row in range(len(table)):
            of_groups[int(table.group[row])] = int(table.prompt_ids(row)[1])
        found[table.manifest.step] = [of_groups[group] for group in sorted(of_groups)]
    return found


def oldest_by_step(loop: Loop) -> dict[int, int]:
    """By how many versions the oldest token of every trained step was behind."""
    found = {}
    for _, table in loop.trained:
        versions = np.concatenate([table.versions(row) for row in range(len(table))])
        found[table.manifest.step] = table.manifest.step - int(versions.min())
    return found


SECONDS = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.015, 0.03]), min_size=8, max_size=8)


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # durations do not shrink to a cause
)
@given(
    ahead=st.integers(1, 5),
    pause=st.sampled_from(["wait", "abort", "keep"]),
    dynamic=st.booleans(),
    rollout_s=SECONDS,
    train_s=SECONDS,
)
def test_the_bound_holds_and_prompts_come_in_order(
    tmp_path_factory, ahead, pause, dynamic, rollout_s, train_s
):
    loop = make(
        tmp_path_factory.mktemp("run"),
        ahead=ahead,
        pause=pause,
        sampling=DYNAMIC if dynamic else {},
    )
    loop.rollout_s = lambda step: rollout_s[step]
    loop.train_s = lambda step: train_s[step]
    loop.run()
    assert [table.manifest.step for _, table in loop.trained] == list(range(NUM_STEPS))
    assert max(oldest_by_step(loop).values()) <= ahead
    for step, version in loop.asked:
        assert step - ahead <= version <= step
    first_asked = [step for step, _ in loop.sampled]
    assert first_asked == sorted(first_asked)

    trained = prompts_by_step(loop)
    counts = Counter(prompt for prompts in trained.values() for prompt in prompts)
    assert max(counts.values()) == 1
    together = 1
    if ahead > 1 and pause != "wait" and not dynamic:
        together = 2
    assert loop.config.steps_sampled_at_once == together
    assert loop.most_steps_in_engines <= together
    if not dynamic:
        drawn = [prompt for step in range(NUM_STEPS) for prompt in trained[step]]
        on_policy = make(tmp_path_factory.mktemp("on_policy"), ahead=0, pause="wait")
        on_policy.run()
        expected = prompts_by_step(on_policy)
        assert drawn == [prompt for step in range(NUM_STEPS) for prompt in expected[step]]
    for record in loop.metrics():
        assert record["staleness/masked_tokens"] == record["staleness/dropped_samples"] == 0
        shares = [v for name, v in record.items() if name.removeprefix("staleness/").isdigit()]
        assert sum(shares) == pytest.approx(1)


def has_sampled_to_the_bound(loop: Loop, step: int) -> bool:
    """Whether all steps are recorded that may be while `step` is trained."""
    last = min(step + loop.config.batch.max_staleness, NUM_STEPS - 1)
    return loop.run_dir.step_store(last).exists()


@pytest.mark.parametrize("ahead", [2, 4])
def test_engines_that_are_faster_go_to_the_bound(tmp_path, ahead):
    loop = make(tmp_path, ahead=ahead)
    loop.training_may_end = partial(has_sampled_to_the_bound, loop)
    loop.run()
    found = oldest_by_step(loop)
    assert [found[step] for step in range(NUM_STEPS)] == [
        min(step, ahead) for step in range(NUM_STEPS)
    ]
    records = loop.metrics()
    assert [r["policy/staleness"] for r in records] == [min(s, ahead) for s in range(NUM_STEPS)]
    assert records[-1][f"staleness/{ahead}"] == 1


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_step_says_seen_and_predicted_staleness(tmp_path, ahead):
    """Training takes much longer than sampling, however slow the machine is at that: the bound is
    reached, and predicted."""
    loop = make(tmp_path, ahead=ahead, pause="keep" if ahead else "wait")
    loop.train_s = lambda step: 0.3
    loop.training_may_end = partial(has_sampled_to_the_bound, loop)
    loop.run()
    records = loop.metrics()
    if not ahead:
        assert not any("staleness/seen_mean" in record for record in records)
        return
    for step, record in enumerate(records):
        assert record["staleness/seen_mean"] <= record["staleness/seen_max"] <= ahead
        assert record["staleness/predicted_mean"] <= record["staleness/predicted_max"] <= ahead
        assert record["staleness/predicted_mean"] <= step
    last = records[-1]
    assert last["staleness/seen_max"] == last["staleness/predicted_max"] == ahead
    every = list(read_metrics(loop.run_dir.metrics))
    assert 0 <= every[-1]["idle/predicted_trainer"] <= 1


def test_an_adapted_bound_is_recorded_and_goes_on(tmp_path, monkeypatch):
    """One step ahead suffices, whatever this machine takes; test_staleness_watch has what suffices
    by durations."""
    monkeypatch.setattr(staleness_watch, "least_bound", lambda flow, seconds, added_idle: 1)
    tables = {"alarms": {"window": 2}, "batch": {"adapt_staleness": True}}
    loop = make(tmp_path, ahead=4, **tables)
    state = loop.run()
    bounds = [record["staleness/bound"] for record in loop.metrics()]
    assert bounds == [4, 4, 3, 2, 1, 1, 1, 1]  # by one, once a window of steps is known
    assert state.bound == 1
    assert loop.states[max(loop.states)].bound == state.bound
    assert max(oldest_by_step(loop).values()) <= 4

    again = make(tmp_path / "again", ahead=4, num_steps=NUM_STEPS + 1, **tables)
    again.run(state)
    assert again.metrics()[0]["staleness/bound"] == state.bound
    assert again.metrics()[0]["staleness/predicted_max"] <= state.bound


def test_steps_of_the_store_predict_nothing(tmp_path):
    loop = make(tmp_path, ahead=2, crash_at=4)
    with pytest.raises(Crash):
        loop.run()
    again = make(tmp_path, ahead=2, num_steps=5)
    state = loop.states[max(loop.states)]
    drop_disconnected(again.run_dir.store, state.step)
    again.run(state)
    of_store = again.metrics()[state.step]
    assert "staleness/seen_mean" in of_store and "staleness/predicted_mean" not in of_store


def test_weights_that_come_in_mid_request_are_counted_by_token(tmp_path):
    loop = make(tmp_path, ahead=3)
    loop.rollout_may_end = lambda step, began_with: loop.version > min(began_with, step - 1)
    loop.run()
    mixed = [r for r in loop.metrics() if len([n for n in r if n[10:].isdigit()]) > 1]
    assert mixed and loop.most_steps_in_engines == 2


def test_recorded_steps_have_no_gap(tmp_path):
    """A step that is sampled before the one before it waits for that one."""
    loop = make(tmp_path, ahead=4, crash_at=2)
    loop.rollout_s = lambda step: 0.05 * (step % 2)
    with pytest.raises(Crash):
        loop.run()
    steps = sorted(step for step, _ in steps_in(loop.run_dir.store))
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("crash_at", range(NUM_STEPS))
@pytest.mark.parametrize(
    ("ahead", "pause", "tables"),
    [
        (2, "keep", {}),
        (4, "keep", {}),
        (4, "wait", {}),
        (4, "abort", {"sampling": DYNAMIC, "curriculum": {"rate": 0.5}}),
    ],
)
def test_what_is_recorded_ahead_is_trained_by_a_resume(tmp_path, ahead, pause, tables, crash_at):
    rng = random.Random(crash_at)
    seconds = [rng.choice([0.0, 0.02]) for _ in range(NUM_STEPS)]
    loop = make(tmp_path, ahead=ahead, pause=pause, crash_at=crash_at, **tables)
    loop.rollout_s = lambda step: seconds[step]
    loop.train_s = lambda step: seconds[-1 - step]
    with pytest.raises(Crash):
        loop.run()
    before = {step: read_manifest(path) for step, path in steps_in(loop.run_dir.store)}
    assert crash_at in before

    state = loop.states[max(loop.states)] if loop.states else START
    again = make(tmp_path, ahead=ahead, pause=pause, **tables)
    drop_disconnected(again.run_dir.store, state.step)
    again.rollout_s = loop.rollout_s
    again.run(state)
    assert not before.keys() & {step for step, _ in again.sampled}
    assert [t.manifest.step for _, t in again.trained] == list(range(state.step, NUM_STEPS))
    for _, table in again.trained:
        if table.manifest.step in before:
            assert table.manifest == before[table.manifest.step]
    assert max(oldest_by_step(again).values()) <= ahead
    assert len(again.metrics()) == NUM_STEPS

    trained = prompts_by_step(loop) | prompts_by_step(again)
    if not tables:
        whole = make(tmp_path / "whole", ahead=ahead, pause=pause)
        whole.run()
        assert trained == prompts_by_step(whole)
        assert again.sampler.state_dict() == whole.sampler.state_dict()
        counts = Counter(prompt for prompts in trained.values() for prompt in prompts)
        assert max(counts.values()) == 1


@pytest.mark.parametrize("too_old", ["drop", "mask"])
def test_tokens_that_are_too_old_all_the_same(tmp_path, too_old):
    """An engine says that it sampled the first tokens of some samples with ancient weights."""
    loop = make(tmp_path, ahead=2, batch={"too_old": too_old}, num_steps=5)

    def written(place, one):
        if place == 0 and one.num_tokens == 4:
            version = one.versions[-1].version
            spans = (VersionSpan(version - 3, 0, 2), VersionSpan(version, 2, 4))
            return replace(one, versions=spans)
        return one

    loop.written = written
    loop.run()
    masked = dropped = 0
    for record, (_, table) in zip(loop.metrics(), loop.trained, strict=True):
        step = table.manifest.step
        num_old = 0
        for row in range(len(table)):
            is_old = table.versions(row) < step - 2
            num_old += is_old.sum()
            np.testing.assert_array_equal(table.tokens_without_loss(row), is_old)
        assert record["staleness/masked_tokens"] == num_old
        assert table.manifest.oldest_trained == (step - 2 if num_old else None)
        assert len(table) == 16 - record["staleness/dropped_samples"]
        assert record["sampling/missing"] == record["staleness/dropped_samples"] / 4
        masked += num_old
        dropped += record["staleness/dropped_samples"]
    assert (masked > 0, dropped > 0) == (too_old == "mask", too_old == "drop")


def test_groups_that_are_too_old_are_refilled(tmp_path):
    loop = make(tmp_path, ahead=1, sampling=DYNAMIC)
    loop.written = lambda place, one: (
        replace(one, versions=(VersionSpan(-9, 0, one.num_tokens),)) if one.num_tokens == 5 else one
    )
    loop.run()
    assert sum(record["staleness/dropped_samples"] for record in loop.metrics()) > 0
    assert [record["sampling/missing"] for record in loop.metrics()] == [0] * NUM_STEPS
    assert max(oldest_by_step(loop).values()) == 1


def test_surplus_that_is_partly_too_old_is_masked(tmp_path):
    """Of groups left over, tokens behind the bound have no loss where they are masked."""
    found = {}
    for too_old in ("drop", "mask"):
        loop = make(
            tmp_path / too_old,
            ahead=1,
            batch={"too_old": too_old},
            sampling=DYNAMIC,
            answer=lambda step, prompt, sample: sample == 0,
            num_steps=3,
        )
        loop.written = lambda place, one: replace(
            completion(4), versions=(VersionSpan(-1, 0, 1), VersionSpan(1, 1, 4))
        )
        state = make(tmp_path / "x", ahead=1, sampling=DYNAMIC)
        state.run()
        acceptance = {**state.sampler.state_dict(), "acceptance": 0.5}
        loop.run(replace(START, sampler=acceptance))
        found[too_old] = [
            (r["sampling/stale_dropped"], r["staleness/masked_tokens"]) for r in loop.metrics()
        ]
    assert found["drop"][0] == (4, 0)
    assert found["mask"][0] == (0, 0) and found["mask"][1] == (0, 16)


def test_an_error_ends_the_steps_behind_it():
    """They are not sampled: the step before them drew no prompts."""
    sampled = []

    async def sample(step, *, on_drawn, before_recording):
        sampled.append(step)
        if step == 1:
            raise EngineError("no engine is alive")
        on_drawn()
        await before_recording()
        return step

    async def main():
        chain = SamplingChain(SimpleNamespace(sample=sample), 2)
        chain.ask(0, 4)
        assert await chain.take(0) == 0
        for step in (1, 2, 3):
            with pytest.raises(EngineError, match="no engine is alive"):
                await chain.take(step)
        await chain.close()
        assert not chain

    asyncio.run(main())
    assert sampled == [0, 1]


def test_no_step_begins_while_a_publish_waits():
    begun, events = [], [asyncio.Event() for _ in range(3)]

    async def sample(step, *, on_drawn, before_recording):
        begun.append(step)
        await events[step].wait()
        on_drawn()
        return step

    async def main():
        chain = SamplingChain(SimpleNamespace(sample=sample), 1)
        chain.ask(0, 2)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(chain.drain(lambda: True))
        for event in events:
            event.set()
        await waiting
        for _ in range(9):
            await asyncio.sleep(0)
        assert begun == [0]
        chain.resume()
        assert [await chain.take(step) for step in range(3)] == [0, 1, 2]

    asyncio.run(main())
    assert begun == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=8))
def test_busy_seconds_are_those_of_the_union(spans):
    """Of intervals (begin, length), however they overlap."""
    moments = []
    for begin, length in spans:
        moments += [(begin, True), (begin + length, False)]
    moments.sort(key=lambda moment: (moment[0], not moment[1]))
    now = SimpleNamespace(perf_counter=lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(busy_clock, "time", now)
        clock = BusyClock()
        for at, begins in moments:
            now.perf_counter = lambda at=at: float(at)
            if begins:
                clock.begin()
            else:
                clock.end()
        edges = sorted({edge for begin, length in spans for edge in (begin, begin + length)})
        expected = 0
        for left, right in pairwise(edges):
            if any(begin <= left and right <= begin + length for begin, length in spans):
                expected += right - left
        assert clock.take() == expected and clock.take() == 0
