"""The pool: order, shares of hostile rewards, and processes that end when they must."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.pool import RewardPool, raised_at, weighted_sum
from grpo_megatron.types import Completion, Prompt, RolloutGroup
from tests.rewards.reward_pools import HOSTILE, domain, group, score

OBEY = f"{HOSTILE}:obey"
TIMEOUT_S = 0.5


def test_the_order_is_that_of_the_groups_whatever_the_workers():
    domains = [domain(OBEY, f"{HOSTILE}:length", name="a"), domain(OBEY, name="b")]

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 10**6), max_size=80)),
            max_size=5,
        )
    )
    def check(batch):
        groups = [group([str(n) for n in numbers], name=name) for name, numbers in batch]
        scored = loop.run_until_complete(pool.score(groups))
        assert [s.group for s in scored] == groups
        for (name, numbers), s in zip(batch, scored, strict=True):
            assert s.components["obey"].tolist() == numbers
            assert ("length" in s.components) == (name == "a")
            assert s.rewards.dtype == np.float64 and s.rewards.shape == (len(numbers),)

    loop = asyncio.new_event_loop()
    pool = RewardPool(domains, num_workers=2)
    try:
        check()
    finally:
        loop.run_until_complete(pool.__aexit__())
        loop.close()


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        ("loop", "timed_out"),
        ("sleep", "timed_out"),
        ("exit", "died"),
        ("segfault", "died"),
        ("sys.exit", "raised"),
        ("interrupt", "raised"),
        ("raise", "raised"),
        ("str", "raised"),
        ("list", "raised"),
        ("complex", "raised"),
        ("inf", "raised"),
        ("huge", "raised"),
    ],
)
def test_a_hostile_sample_costs_itself_only(order, cause):
    texts = ["1", "2", order, "3", order, "4"]
    [scored], pool = score(
        [domain(OBEY)], [group(texts)], timeout_s=TIMEOUT_S if cause == "timed_out" else 60
    )
    np.testing.assert_equal(scored.rewards, [1, 2, math.nan, 3, math.nan, 4])
    metrics = pool.take_metrics()
    assert metrics[f"reward/d.obey/{cause}"] == 2
    assert sum(metrics.values()) == 2 + metrics["reward/pool/restarts"]
    assert metrics["reward/pool/restarts"] == (0 if cause == "raised" else 2)
    assert bool(pool.components[0].trace) == (cause == "raised")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("list", "a list of (end, reward), one for each step: '1.0' in its list is no such pair"),
        ("complex", "a reward must return a real number, not "),
    ],
)
def test_what_a_reward_may_return_is_told(text, words):
    _, pool = score([domain(OBEY)], [group(["1", text])])
    assert words in raised_at(pool.components[0].trace)


def test_who_cannot_correct_a_function_is_not_asked_to():
    arguments = {"url": "http://127.0.0.1:9", "model": "m"}
    judge = {"function": "grpo_megatron.rewards.judge:judge", "arguments": arguments}
    with pytest.raises(RewardError, match="no answer: ") as caught:
        score([domain(judge)], [group(["1"])])
    assert caught.value.remedy == "mend what it names, or raise [data] reward_timeout_s"
    with pytest.raises(RewardError, match="no reward for ") as caught:
        score([domain(OBEY)], [group(["raise"])])
    assert caught.value.remedy.startswith("correct the function, or ")


def test_failures_of_what_is_scored_uncounted_are_in_no_metric():
    async def run():
        async with RewardPool([domain(OBEY)]) as pool:
            counted = pool.score([group(["1", "raise"])])
            uncounted = pool.score([group(["2", "raise", "raise"])], is_counted=False)
            await asyncio.gather(counted, uncounted)
            return pool.take_metrics()

    assert asyncio.run(run())["reward/d.obey/raised"] == 1


def test_odd_numbers_prints_and_reads():
    texts = ["True", "int", "None", "nan", "print", "read", "-0.5"]
    [scored], pool = score([domain(OBEY)], [group(texts)])
    np.testing.assert_equal(scored.rewards, [1, 7, math.nan, math.nan, 1, 0, -0.5])
    assert not any(pool.take_metrics().values())


def test_prints_go_to_the_log(tmp_path):
    log = tmp_path / "rewards.log"
    score([domain(OBEY)], [group(["print"])], log_path=log)
    told = log.read_text()
    assert "printed by a reward" in told and "more" in told and "raw" in told


def test_a_reward_that_prints_without_end_fills_no_disk(tmp_path):
    log = tmp_path / "rewards.log"
    log.write_text("of the start\n")
    texts = ["1", "flood", "print", "2"]
    [scored], pool = score([domain(OBEY)], [group(texts)], log_path=log, timeout_s=600)
    np.testing.assert_equal(scored.rewards, [1, math.nan, 1, 2])
    assert pool.take_metrics()["reward/d.obey/died"] == 1
    assert log.stat().st_size < 1 << 22
    told = log.read_text()
    assert told.startswith("of the start") and "printed without end and is killed" in told
    assert "printed by a reward" in told


def test_the_first_traceback_is_kept_and_logged_once(caplog):
    _, pool = score([domain(OBEY)], [group(["1"] + ["raise"] * 100)])
    assert "no reward for 37 + 48 =" in pool.components[0].trace
    assert caplog.text.count("Traceback") == 1


def test_a_long_message_costs_its_sample_only(monkeypatch):
    monkeypatch.setattr("grpo_megatron.rewards.places._LONGEST_LINE", 1 << 20)
    texts = ["steps 1", "raise 3000000", "steps 2"]
    [scored], pool = score([domain(f"{HOSTILE}:says_much")], [group(texts)])
    np.testing.assert_equal(scored.rewards, [0.5, math.nan, 1])
    assert pool.take_metrics()["reward/d.says_much/raised"] == 1
    told = raised_at(pool.components[0].trace)
    assert "The message begins." in told and "hostile.py" in told
    assert "characters left out" in told and "It ends." in told
    assert len(pool.components[0].trace) < 1 << 16


def test_more_steps_than_a_completion_may_have_are_refused():
    texts = ["steps 1", f"steps {(1 << 20) + 1}", f"steps {1 << 20}"]
    [scored], pool = score([domain(f"{HOSTILE}:says_much")], [group(texts)], timeout_s=60)
    np.testing.assert_equal(scored.rewards, [0.5, math.nan, 1 << 19])
    assert "1048577 steps are more than 1048576" in pool.components[0].trace


def test_a_reply_that_is_too_long_costs_its_sample_only(monkeypatch):
    monkeypatch.setattr("grpo_megatron.rewards.places._LONGEST_LINE", 1 << 16)
    texts = ["steps 1", "steps 50000", "steps 2"]
    [scored], pool = score([domain(f"{HOSTILE}:says_much")], [group(texts)])
    np.testing.assert_equal(scored.rewards, [0.5, math.nan, 1])
    assert pool.take_metrics()["reward/d.says_much/died"] == 1


@pytest.mark.parametrize("number", [1, 5])
def test_a_reward_that_always_raises_stops_the_run(number):
    domains = [domain(OBEY, {"function": f"{HOSTILE}:always_raises", "arguments": {"x": 1}})]
    with pytest.raises(RewardError) as caught:
        score(domains, [group(["1"] * number)])
    for word in ("always_raises", f"{number} raised", "broken reward", "[[domains]] d"):
        assert word in str(caught.value)


def test_a_bad_group_stops_nothing_once_the_reward_has_worked():
    async def run():
        async with RewardPool([domain(OBEY)]) as pool:
            await pool.score([group(["1"])])
            [bad] = await pool.score([group(["raise"] * 8)])
            assert np.isnan(bad.rewards).all()
            with pytest.raises(RewardError, match="64 raised"):
                await pool.score([group(["raise"] * 64)])

    asyncio.run(run())


def test_a_reward_that_always_hangs_stops_the_run_early(monkeypatch):
    monkeypatch.setattr("grpo_megatron.rewards.pool.MAX_KILLS", 3)
    with pytest.raises(RewardError, match="timed out on 3 samples"):
        score([domain(f"{HOSTILE}:always_loops")], [group(["1"] * 500)], timeout_s=0.1)


def test_components_are_weighted_and_skipped():
    domains = [
        domain(
            {"function": OBEY, "weight": 2.0},
            {"function": f"{HOSTILE}:length", "weight": -0.5, "name": "brevity"},
        )
    ]
    [scored], _ = score(domains, [group(["10", "None", "nan"])])
    np.testing.assert_equal(scored.components["obey"], [10, math.nan, math.nan])
    np.testing.assert_equal(scored.components["brevity"], [2, 4, 3])
    np.testing.assert_equal(scored.rewards, [19, -2, -1.5])
    table = np.array([[math.nan, math.nan], [1, math.nan]])
    np.testing.assert_equal(weighted_sum(table, np.array([1.0, 1.0])), [math.nan, 1])


@pytest.mark.parametrize("order", ["raise", "loop", "exit"])
@pytest.mark.parametrize("weight", [2.0, -1.0, 0.0])
def test_a_component_that_fails_makes_its_sample_unscorable(order, weight):
    """What the other components say alone would be the reward of a bad answer."""
    length = {"function": f"{HOSTILE}:length", "weight": 0.5}
    domains = [domain({"function": OBEY, "weight": weight}, length)]
    timeout_s = 60.0
    if order == "loop":
        timeout_s = TIMEOUT_S
    [scored], _ = score(domains, [group(["10", order, "0"])], timeout_s=timeout_s)
    np.testing.assert_equal(scored.components["obey"], [10, math.nan, 0])
    np.testing.assert_equal(scored.components["length"], [2, len(order), 1])
    of_failed = math.nan
    if weight == 0:  # it says nothing that the sum has
        of_failed = len(order) / 2
    np.testing.assert_equal(scored.rewards, [10 * weight + 1, of_failed, 0.5])


@pytest.mark.parametrize("number", ["None", "nan"])
def test_a_component_without_weight_stands_for_none_that_cannot_be_scored(number):
    """A sum of nothing that weighs is no reward of 0."""
    length = {"function": f"{HOSTILE}:length", "weight": 0.0}
    [scored], pool = score([domain(OBEY, length)], [group(["10", number])])
    np.testing.assert_equal(scored.rewards, [10, math.nan])
    np.testing.assert_equal(scored.components["length"], [2, len(number)])
    assert not any(pool.take_metrics().values())


def test_a_component_without_weight_that_cannot_be_scored_costs_nothing():
    logged = {"function": OBEY, "weight": 0.0}
    [scored], _ = score([domain(f"{HOSTILE}:length", logged)], [group(["None", "10"])])
    np.testing.assert_equal(scored.components["obey"], [math.nan, 10])
    assert scored.rewards.tolist() == [4, 2]


def test_where_no_component_weighs_anything_what_is_scored_is_worth_nothing():
    logged = {"function": OBEY, "weight": 0.0}
    [scored], _ = score([domain(logged)], [group(["3", "None"])])
    np.testing.assert_equal(scored.rewards, [0, math.nan])


def test_step_rewards_are_kept_beside_their_sum():
    steps = {"function": f"{HOSTILE}:lines_right", "weight": 0.5, "name": "steps"}
    texts = ["right\nno\nright\n", ""]
    [scored, other], _ = score([domain(OBEY, steps)], [group(texts), group(["3"])], num_workers=2)
    np.testing.assert_equal(scored.components["steps"], [2, 0])
    assert scored.steps == (((6, 0.5), (9, 0.0), (15, 0.5)), ())
    assert other.steps == ()
    [plain], _ = score([domain(OBEY)], [group(["3"])])
    assert plain.steps == ()


def test_one_step_that_cannot_be_scored_takes_all_of_its_reward():
    """A token is credited with its step and all later ones: without one of them, it is not."""
    steps = f"{HOSTILE}:lines_right"
    texts = ["right\nunknown\n", "right\n"]
    beside = {"function": f"{HOSTILE}:length", "weight": 0.5}
    [scored], _ = score([domain(steps, beside)], [group(texts)])
    np.testing.assert_equal(scored.components["lines_right"], [math.nan, 1])
    assert scored.rewards.tolist() == [7, 4]
    assert scored.steps == ((), ((6, 1.0),))
    [alone], _ = score([domain(steps, {**beside, "weight": 0.0})], [group(texts)])
    np.testing.assert_equal(alone.rewards, [math.nan, 1])
    assert alone.steps == ((), ((6, 1.0),))


@pytest.mark.parametrize("name", ["ends_as_told", "ends_as_told_later"])
def test_a_step_ends_within_its_completion(name):
    """Elsewhere no token is its last one. Of an empty completion it ends at 0."""
    texts = ["1", "02", "", "0", "-1", "2", "004"]
    [scored], pool = score([domain(f"{HOSTILE}:{name}")], [group(texts)])
    np.testing.assert_equal(scored.rewards, [1, 1, 1, *[math.nan] * 4])
    assert scored.steps == (((1, 1.0),), ((2, 1.0),), ((0, 1.0),), (), (), (), ())
    assert pool.take_metrics()[f"reward/d.{name}/raised"] == 4
    told = pool.components[0].trace
    assert "a step ends at 0 of 1 characters" in told and "from 1 to 1" in told


def test_steps_without_weight_are_none():
    """They would stand among those of a reward that has some, and move their mean."""
    logged = {"function": f"{HOSTILE}:lines_right", "weight": 0.0, "name": "logged"}
    text = "right\nno\n"
    [scored], _ = score([domain(f"{HOSTILE}:lines_right", logged)], [group([text])])
    assert scored.steps == (((6, 1.0), (9, 0.0)),)
    assert scored.components["logged"].tolist() == [1]
    [alone], _ = score([domain(f"{HOSTILE}:length", logged)], [group([text])])
    assert alone.steps == ()


def test_the_sum_is_clipped():
    [scored], _ = score([domain(OBEY, reward_clip=5.0)], [group(["10", "-10", "2", "None"])])
    np.testing.assert_equal(scored.rewards, [5, -5, 2, math.nan])
    np.testing.assert_equal(scored.components["obey"], [10, -10, 2, math.nan])


def test_the_outcome_of_an_episode_is_a_reward():
    episodes = group(["a", "b", "c"])
    worth = [1.0, math.nan, 0.25]
    completions = []
    for completion, outcome in zip(episodes.completions, worth, strict=True):
        completions.append(replace(completion, outcome=outcome))
    [scored], _ = score([domain("environment")], [replace(episodes, completions=completions)])
    np.testing.assert_array_equal(scored.components["environment"], worth)
    np.testing.assert_array_equal(scored.rewards, worth)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", ["takes_a_word", "waits_and_takes_a_word"])
def test_a_reward_that_changes_its_metadata_changes_those_of_no_other_call(name, num_workers):
    """Whatever stands in them, for the samples behind it, other components and the caller."""
    sampled = group(["a", "b", "c", "d"])
    metadata = {"words": ["x", "y"], "level": 1}
    sampled = replace(sampled, prompt=replace(sampled.prompt, metadata=metadata))
    function = f"{HOSTILE}:{name}"
    [scored], _ = score(
        [domain(function, {"function": function, "name": "again"})],
        [sampled],
        num_workers=num_workers,
    )
    assert scored.components[name].tolist() == [2] * 4
    assert scored.components["again"].tolist() == [2] * 4
    assert metadata == {"words": ["x", "y"], "level": 1}


def test_tokens_are_counted_as_the_engine_reported_them():
    ids = np.array([3, 4, 5], dtype=np.int32)
    completions = tuple(
        Completion(ids, np.zeros(3, np.float32), (), reason, "") for reason in ("stop", "length")
    )
    sampled = RolloutGroup(Prompt("d-1", "d", "", (1,), "85"), completions, 0)
    [scored], _ = score([domain(f"{HOSTILE}:tokens")], [sampled])
    assert scored.rewards.tolist() == [12, 12.5]


def test_workers_import_nothing_heavy():
    heavy = "torch vllm transformers pydantic numpy"
    [scored], _ = score([domain(f"{HOSTILE}:counts_modules")], [group([heavy])])
    assert scored.rewards.tolist() == [0]


def test_concurrent_calls_share_the_workers():
    async def run():
        async with RewardPool([domain(OBEY)], num_workers=2, timeout_s=60) as pool:
            batches = [[group([str(i), "exit" if i == 3 else "0"])] for i in range(8)]
            scored = await asyncio.gather(*map(pool.score, batches))
            assert [s[0].rewards[0] for s in scored] == list(range(8))

    asyncio.run(run())


def test_a_cancelled_call_leaves_a_working_pool(tmp_path):
    async def run():
        log = tmp_path / "log"
        async with RewardPool([domain(OBEY)], timeout_s=1000, log_path=log) as pool:
            stuck = asyncio.ensure_future(pool.score([group(["print", "loop"])]))
            while not log.stat().st_size:
                await asyncio.sleep(0.01)
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            [scored] = await pool.score([group(["5"])])
            assert scored.rewards.tolist() == [5]

    asyncio.run(run())


def test_a_busy_parent_blames_nobody():
    async def run():
        async with RewardPool([domain(OBEY)], timeout_s=1.0) as pool:
            scoring = asyncio.ensure_future(pool.score([group(["nap"] * 4)]))
            await asyncio.sleep(0.06)
            time.sleep(1.5)
            [scored] = await scoring
            assert scored.rewards.tolist() == [1] * 4
            assert not any(pool.take_metrics().values())

    asyncio.run(run())


def test_a_process_killed_while_idle_is_replaced_without_blame():
    async def run():
        async with RewardPool([domain(OBEY)]) as pool:
            process = pool._workers[0].place.process
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            [scored] = await pool.score([group(["1", "2"])])
            assert scored.rewards.tolist() == [1, 2]
            metrics = pool.take_metrics()
            assert metrics.pop("reward/pool/restarts") == 1 and not any(metrics.values())
            assert not any(pool.take_metrics().values())

    asyncio.run(run())


def test_failing_workers(tmp_path, monkeypatch):
    module = tmp_path / "only_here.py"
    module.write_text("def reward(completion, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    pool = RewardPool([domain("only_here:reward")])
    module.write_text("import no_such_module\n")
    with pytest.raises(RewardError, match="cannot start: module only_here fails"):
        asyncio.run(pool.__aenter__())


PARENT = f"""
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored
from grpo_megatron.types import Completion, Prompt, RolloutGroup
from tests.rewards.reward_pools import domain, group
from grpo_megatron.rewards.pool import RewardPool

async def main():
    pool = RewardPool([domain("{OBEY}")], num_workers=2, timeout_s=1000)
    await pool.__aenter__()
    print(*(worker.place.process.pid for worker in pool._workers), flush=True)
    await pool.score([group(["loop"])])  # one worker hangs, the other is idle

try:
    asyncio.run(main())
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_and_say_nothing(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    os.killpg(parent.pid, number)  # as a terminal's Ctrl-C does: the whole foreground group
    assert parent.communicate()[1] == ""
    while any(_alive(pid) for pid in pids):  # the test's own time limit ends a failure
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
