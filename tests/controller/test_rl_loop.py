"""Steps with refill, without groups, with surplus; resumed equals uninterrupted."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.config.evaluated_share import EvaluatedShare
from grpo_megatron.controller import rl_loop
from grpo_megatron.controller.recorder import steps_in
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.launch.offline import recorded_steps
from tests.controller.loops import Crash, Loop, chance
from tests.controller.scored_groups import recipe

NAN = np.nan
CURRICULUM = {"rate": 0.5}


def make(root, answer=chance, num_prompts=32, crash_at=None, domains=("p",), **tables) -> Loop:
    config = recipe(domains, **({"num_steps": 6, "checkpoint": {"interval": 2}} | tables))
    return Loop(root, config, answer, num_prompts, crash_at)


def test_the_default_trains_every_group_of_one_round(tmp_path):
    loop = make(tmp_path)
    loop.run()
    assert loop.sampled == [(step, 4) for step in range(6)]
    for record, (_, table) in zip(loop.metrics(), loop.trained, strict=True):
        assert len(table) == 16 and not table.manifest.stale
        assert record["sampling/rounds"] == record["sampling/acceptance_rate"] == 1
        assert record["sampling/surplus"] == record["sampling/skipped_steps"] == 0
        assert not any("@" in name or name.startswith("curriculum") for name in record)


def test_metrics_of_environments_are_in_the_line_of_their_step(tmp_path):
    """What evaluations left behind is taken before a step is sampled, and not counted."""
    loop = make(tmp_path, num_steps=2)
    taken = itertools.count()
    loop.take_metrics = lambda: {"environment/p/episodes": float(next(taken))}
    loop.written = lambda place, completion: replace(completion, outcome_metrics={"calls": place})
    loop.run()
    records = loop.metrics()
    assert [record["environment/p/episodes"] for record in records] == [1, 3]
    assert [record["environment/p/calls_mean"] for record in records] == [1.5, 1.5]


def test_dynamic_sampling_trains_full_batches_of_mixed_groups(tmp_path):
    loop = make(tmp_path, sampling={"dynamic": True, "max_refill_rounds": 9})
    loop.run()
    assert len({step for step, _ in loop.sampled}) == 6 and len(loop.sampled) > 6
    for record, (_, table) in zip(loop.metrics(), loop.trained, strict=True):
        assert len(table) == 16 and record["sampling/missing"] == 0
        sums = np.bincount(table.group, table.reward)
        assert ((sums > 0) & (sums < 4)).all()
        assert record["sampling/stale_dropped"] == record["sampling/surplus"]


def interrupted(root, crash_at: int, **tables) -> Loop:
    """Crash while a step trains, then resume from the newest checkpoint."""
    loop = make(root, crash_at=crash_at, **tables)
    with pytest.raises(Crash):
        loop.run()
    step = max(loop.states, default=0)
    again = make(root, **tables)
    again.run(loop.states[step]) if step else again.run()
    return again


@pytest.mark.parametrize("crash_at", range(6))
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"sampling": {"dynamic": True}},
        {"curriculum": CURRICULUM},
        {
            "sampling": {"dynamic": True},
            "objective": {"overlong": "drop"},
            "curriculum": CURRICULUM,
            "domains": ("p", "q"),
        },
    ],
)
def test_resumed_equals_uninterrupted(tmp_path, tables, crash_at):
    whole = make(tmp_path / "whole", **tables)
    whole.run()
    found = interrupted(tmp_path / "cut", crash_at, **tables)
    assert found.metrics() == whole.metrics()
    assert found.sampler.state_dict() == whole.sampler.state_dict()
    # the step that was recorded before the crash is trained from the store
    assert crash_at not in {step for step, _ in found.sampled}
    for (_, table), (_, expected) in zip(found.trained[::-1], whole.trained[::-1], strict=False):
        assert table.manifest == expected.manifest


@pytest.mark.parametrize(("slowly", "waits"), [(False, True), (True, True), (True, False)])
def test_a_checkpoint_is_there_when_it_is_written(tmp_path, slowly, waits):
    """Beside the next step, or before it; a crash meanwhile costs what came since the last one."""
    tables = {"checkpoint": {"interval": 2, "beside_next_step": not waits}}
    loop = make(tmp_path, crash_at=4, **tables)
    loop.writes_slowly = slowly
    with pytest.raises(Crash):
        loop.run()
    expected = [2]
    if waits:
        expected.append(4)
    assert sorted(loop.states) == expected
    events = [json.loads(line) for line in loop.run_dir.events.read_text().splitlines()]
    assert [event["step"] for event in events] == sorted(loop.states)
    again = make(tmp_path, **tables)
    state = again.run(loop.states[max(loop.states)])
    assert state.step == 6 and sorted(again.states)[-1] == 6


def test_what_ends_a_run_does_not_cost_a_checkpoint_that_is_being_written(tmp_path):
    loop = make(tmp_path)
    loop.writes_slowly = True
    loop.mismatch_at = 3
    with pytest.raises(MismatchError):
        loop.run()
    assert sorted(loop.states) == [2]


@pytest.mark.parametrize("value", [0.0, 1.0, NAN])
def test_steps_without_a_kept_group_are_skipped_and_the_run_goes_on(tmp_path, value):
    def answer(step, prompt, sample):
        return value if step in (1, 2) else chance(step, prompt, sample)

    tables = {
        "sampling": {"dynamic": True},
        "curriculum": CURRICULUM,
        "num_prompts": 64,
        "checkpoint": {"interval": 2, "keep": 3},
    }
    loop = make(tmp_path / "a", answer, **tables)
    state = loop.run()
    assert [name for name, _ in loop.trained] == [f"step_{s:06d}" for s in (0, 3, 4, 5)]
    assert state.updates == 4 and state.step == 6
    assert loop.renewed == [1, 2]  # the reference follows the policy after these, too
    records = loop.metrics()
    assert [r["sampling/skipped_steps"] for r in records] == [0, 1, 1, 0, 0, 0]
    assert records[1]["sampling/missing"] == 4 and records[1]["sampling/rounds"] == 5
    assert records[1]["sampling/acceptance_rate"] == 0
    assert all(v is not None for r in records for name, v in r.items() if value == value)
    again = make(tmp_path / "a", answer, **tables)  # the skipped step 2 is read, not sampled
    again.run(loop.states[2])
    assert again.metrics() == records and 2 not in {step for step, _ in again.sampled}


def test_rounds_run_out_and_what_there_is_is_trained(tmp_path):
    def answer(step, prompt, sample):
        return float(prompt.prompt_id == "p3" and sample == 0)

    loop = make(
        tmp_path,
        answer,
        num_prompts=8,
        num_steps=2,
        sampling={"dynamic": True, "max_refill_rounds": 9},
    )
    loop.run()
    assert [len(table) for _, table in loop.trained] == [4, 4]
    assert {r["sampling/missing"] for r in loop.metrics()} == {3}


def test_surplus_is_trained_next_with_its_own_version(tmp_path):
    loop = make(
        tmp_path,
        lambda step, prompt, sample: sample == 0,
        num_steps=3,
        sampling={"dynamic": True, "surplus_staleness": 1, "max_oversampling": 2.0},
    )
    loop.run(RunStateWith(acceptance=0.5))
    records = loop.metrics()
    assert [r["sampling/surplus"] for r in records] == [4, 0, 0]
    assert loop.sampled == [(0, 8), (2, 4)]  # step 1 lives on what step 0 left
    (_, first), (_, second), (_, third) = loop.trained
    assert not first.manifest.stale and second.manifest.stale
    assert not third.manifest.stale
    assert {int(second.versions(row)[0]) for row in range(len(second))} == {0}
    assert [r["sampling/stale_dropped"] for r in records] == [0, 0, 0]


def RunStateWith(acceptance: float):
    """A state whose next step expects this acceptance."""
    from grpo_megatron.controller.trainer_link import RunState
    from grpo_megatron.data.sampler import PromptSampler
    from tests.controller.scored_groups import prompt_of

    sampler = PromptSampler({"p": [prompt_of(f"p{i}", "p") for i in range(32)]}, {"p": 1.0}, 0)
    return RunState(0, 0, {**sampler.state_dict(), "acceptance": acceptance}, 0.0, 0.0)


def test_surplus_that_would_be_too_old_is_dropped_and_counted(tmp_path):
    loop = make(
        tmp_path, lambda step, prompt, sample: sample == 0, num_steps=2, sampling={"dynamic": True}
    )
    loop.run(RunStateWith(acceptance=0.5))
    assert [r["sampling/stale_dropped"] for r in loop.metrics()] == [4, 0]
    assert not loop.trained[1][1].manifest.stale


@pytest.mark.parametrize("surplus", [0, 1])
def test_rollouts_one_step_ahead_keep_the_cap(tmp_path, surplus):
    loop = make(
        tmp_path,
        batch={"num_prompts": 4, "num_samples_per_prompt": 4, "max_staleness": 1},
        sampling={"dynamic": True, "surplus_staleness": surplus, "max_oversampling": 4},
    )
    loop.run()
    oldest = [
        step - min(int(t.versions(row)[0]) for row in range(len(t)))
        for step, (_, t) in enumerate(loop.trained)
    ]
    assert len(loop.trained) == 6 and max(oldest) == 1 + surplus
    assert all(t.manifest.stale for _, t in loop.trained[1:])


AHEAD = {"batch": {"num_prompts": 4, "num_samples_per_prompt": 4, "max_staleness": 1}}


def test_the_next_samples_are_asked_for_before_their_weights_have_come(tmp_path):
    """Of engines that pause: they are of the new weights all the same, and say so."""
    loop = make(tmp_path)
    loop.run()
    assert loop.asked == [(0, 0)] + [(step, step - 1) for step in range(1, 6)]
    for step, (_, table) in enumerate(loop.trained):
        assert not table.manifest.stale and table.manifest.version == step
        assert {int(table.versions(row)[0]) for row in range(len(table))} == {step}


@pytest.mark.parametrize(
    ("tables", "late"),
    [
        ({"evaluation": {"interval": 2}}, {2, 4}),  # which has the engines for itself
        ({"placement": {"shared_servers": ["http://127.0.0.1:1"]}}, {1, 2, 3, 4, 5}),
        (AHEAD, set()),
    ],
)
def test_when_the_next_samples_are_not_asked_for_early(tmp_path, tables, late):
    loop = make(tmp_path, **tables)
    loop.run()
    assert loop.asked == [(step, step if step in late else max(step - 1, 0)) for step in range(6)]


@pytest.mark.parametrize("tables", [{}, AHEAD])
def test_what_runs_beside_a_phase_is_shown_after_it(tmp_path, tables, monkeypatch):
    """Else the screen calls a publish `rollout`, and the rollout that follows nothing at all."""
    shown = []
    for module in ("display", "rl_loop"):
        monkeypatch.setattr(
            f"grpo_megatron.controller.{module}.show",
            lambda kind, **fields: shown.append(fields["name"] if kind == "phase" else kind),
        )
    make(tmp_path, **tables, num_steps=3, checkpoint={"interval": 9}).run()
    first, *others = " ".join(shown).split(" step ")
    assert first == "rollout reward train publish"
    waiting = "reward" if tables else "rollout reward"
    assert others == [f"{waiting} train publish"] * 2 + ["checkpoint"]


@pytest.mark.parametrize("mode", ["colocated", "separate"])
def test_engines_pause_while_none_can_join(tmp_path, mode):
    """One that joins would lose the trainer's streams to them."""
    paused = []

    class Pausing(Loop):
        async def pause_engines(self):
            paused.append(self.is_training)
            await super().pause_engines()

    Pausing(tmp_path, recipe(placement={"mode": mode}, num_steps=2)).run()
    assert paused == [True] * (4 if mode == "colocated" else 2)


def test_what_was_asked_for_ends_with_a_publish_that_fails(tmp_path):
    loop = make(tmp_path)
    loop.publish_fails_at = 2
    with pytest.raises(EngineError, match="no engine is alive"):
        loop.run()
    assert loop.dropped == [2] and not loop.run_dir.step_store(2).exists()


def test_samples_are_their_own_logprob_check_where_they_can_be(tmp_path):
    """Where the trainer computes what the engines computed, it looks; else prompts are sent."""
    plain, replayed, ahead = (
        make(tmp_path / name, num_steps=3, **tables)
        for name, tables in {
            "plain": {},
            "replayed": {"routing": {"replay": "r3"}},
            "ahead": AHEAD,
        }.items()
    )
    for loop in (plain, replayed, ahead):
        loop.run()
        assert loop.exact == [True] * 3
    assert (plain.checked, replayed.checked, ahead.checked) == ([], [0, 1, 2], [0, 1, 2, 3])
    surplus = make(
        tmp_path / "surplus",
        lambda step, prompt, sample: sample == 0,
        num_steps=3,
        sampling={"dynamic": True, "surplus_staleness": 1, "max_oversampling": 2.0},
    )
    surplus.run(RunStateWith(acceptance=0.5))
    assert surplus.checked == [1]  # of the step that is trained from older samples


def test_engines_whose_groups_are_not_trained_get_a_logprob_check(tmp_path):
    """What is wrong with an engine may be why its groups are dropped."""

    def wrong(step, prompt, sample):  # engine 1 answers nothing right
        return sample % 2 * float(sum(prompt.prompt_id.encode()) % 2 == 0)

    dropped = make(tmp_path / "dropped", wrong, num_steps=3, sampling={"zero_variance": "drop"})
    dropped.num_engines = 2
    dropped.run()
    assert dropped.checked == [0, 1, 2] and len(dropped.trained) == 3
    kept = make(tmp_path / "kept", wrong, num_steps=3)
    kept.num_engines = 2
    kept.run()
    assert kept.checked == []
    nothing = make(
        tmp_path / "nothing", lambda *_: 1.0, num_steps=2, sampling={"zero_variance": "drop"}
    )
    nothing.run()
    assert nothing.checked == [0, 1] and nothing.trained == []


def test_samples_of_an_engine_that_died_do_not_stand_for_the_one_that_joined(tmp_path):
    """Both have the same number."""
    joined = make(tmp_path, num_steps=2)
    joined.unchecked.add(0)
    joined.run()
    assert joined.checked == [0] and joined.unchecked == set()


def test_samples_that_disagree_are_kept_aside_and_sampled_anew(tmp_path):
    loop = make(tmp_path, num_steps=3)
    loop.mismatch_at = 1
    with pytest.raises(MismatchError):
        loop.run()
    store = loop.run_dir.step_store(1)
    assert not store.exists() and recorded_steps(loop.run_dir) == []
    assert (loop.run_dir.store / "rejected_step_000001" / "manifest.json").exists()
    again = make(tmp_path, num_steps=3)
    again.run()
    assert [step for step, _ in again.sampled] == [1, 2] and again.checked == [0]


def test_what_was_never_finished_is_no_recorded_step(tmp_path):
    """A kill between the manifest and the directory's final name."""
    loop = make(tmp_path, num_steps=1)
    loop.run()
    unfinished = loop.run_dir.store / "step_000001.tmp"
    unfinished.mkdir()
    (unfinished / "manifest.json").write_text("{}")
    assert [step for step, _ in steps_in(loop.run_dir.store)] == [0]
    assert recorded_steps(loop.run_dir) == []  # there is no recipe to compute it with


def test_which_recorded_samples_are_of_the_weights_that_train_them(tmp_path):
    """The first ones after a resume; the next ones' may have come out a little different."""
    with pytest.raises(Crash):
        make(tmp_path, crash_at=3, checkpoint={"interval": 9}).run()
    again = make(tmp_path)
    again.run()
    assert again.exact == [True, False, False, False, True, True]
    assert again.checked == [0, 1, 2, 3]  # of engines that sampled nothing yet


def test_truncated_samples_are_recorded_as_they_are(tmp_path):
    """Sample 3 of every group is truncated; the trainer filters, the store keeps everything."""
    loop = make(
        tmp_path,
        lambda step, prompt, sample: float(sample < 2),
        num_steps=1,
        objective={"overlong": "drop"},
    )
    loop.run()
    table = loop.trained[0][1]
    assert table.truncated.tolist() == [i % 4 == 3 for i in range(16)]
    assert not np.isnan(table.reward).any()
    np.testing.assert_array_equal(table.components["right"], table.reward)


def test_metrics_by_domain(tmp_path):
    loop = make(tmp_path, domains=("p", "q"), num_steps=1, curriculum=CURRICULUM)
    loop.run()
    record = loop.metrics()[0]
    for name in (
        "sampling/acceptance_rate",
        "group/all_wrong_fraction",
        "accuracy/pass_at_1",
        "response/length_p95",
    ):
        assert {name, f"{name}@p", f"{name}@q"} <= set(record)
    assert record["curriculum/unseen"] == 60
    assert record["curriculum/unseen@p"] == record["curriculum/unseen@q"] == 30


def test_an_evaluation_is_no_part_of_the_next_step(tmp_path, monkeypatch):
    """Engines that answer its prompts are not idle, nor does a step take longer for it."""
    ticks = itertools.count()
    evaluations_s = 0.0
    passed = []

    async def evaluate(prompts) -> EvaluatedShare:
        nonlocal evaluations_s
        evaluations_s += 1e6
        return EvaluatedShare(0.5, 8)

    def shares(seconds, step_s, roles) -> dict:
        passed.append(step_s)
        return {}

    clock = SimpleNamespace(monotonic=lambda: next(ticks) + evaluations_s)
    monkeypatch.setattr(rl_loop, "time", clock)
    monkeypatch.setattr(rl_loop, "idle_shares", shares)
    loop = make(tmp_path, evaluation={"interval": 2})
    loop.greedy_accuracy = evaluate
    loop.run()
    assert evaluations_s == 3e6
    assert len(passed) == 6 and max(passed) < 100


def test_metrics_have_what_an_evaluation_could_not_score(tmp_path, monkeypatch):
    results = [EvaluatedShare(0.5, 8, 2), EvaluatedShare(1.0, 8, 7), EvaluatedShare(math.nan, 8, 8)]
    told = []

    async def evaluate(prompts) -> EvaluatedShare:
        return results.pop(0)

    def show(kind, *, text="", **_) -> None:
        if kind == "message":
            told.append(text)

    monkeypatch.setattr(rl_loop, "show", show)
    loop = make(tmp_path, evaluation={"interval": 2})
    loop.greedy_accuracy = evaluate
    loop.run()
    evaluated = [record for record in loop.metrics() if "evaluation/unscorable" in record]
    assert [record["step"] for record in evaluated] == [1, 3, 5]
    assert [record["evaluation/unscorable"] for record in evaluated] == [2, 7, 8]
    assert [record.get("evaluation/accuracy") for record in evaluated] == [0.5, 1.0, None]
    assert "evaluation/accuracy" not in evaluated[-1]
    assert [text for text in told if "scored" in text] == [
        "step 3: validation accuracy 1.000 (unreliable: 7 of 8 prompts could not be scored)",
        "step 5: validation accuracy unknown (unreliable: 8 of 8 prompts could not be scored)",
    ]
