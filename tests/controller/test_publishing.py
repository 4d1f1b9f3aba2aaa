"""Engines that sleep while the trainer has their devices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.client import EngineUnreachable
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.requests import LogprobComparison
from grpo_megatron.types import Completion, Prompt, VersionSpan
from tests.controller.scored_groups import recipe


class Engine:
    """Notes its control calls; a dead one fails."""

    def __init__(self):
        self.calls, self.is_alive, self.cause_of_death = [], True, None
        self.client = self
        self.name = self.base_url = "engine"
        self.call_workers = self.reset_prefix_cache = self.set_weight_version = self._done

    async def control(self, path, *args, params=None, **options):
        if not self.is_alive:
            raise EngineUnreachable("gone")
        self.calls.append((path, params))

    async def health(self) -> bool:
        return self.is_alive

    async def _done(self, *args, **options):
        return {}


def colocated(engines: list[Engine], gpus: int) -> Publisher:
    return Publisher(
        recipe(publish={"method": "file"}, placement={"mode": "colocated", "gpus_per_node": gpus}),
        None,
        None,
        ReplicaPool(engines),
    )


def test_engines_that_slept_are_woken_by_whoever_publishes_next():
    """One of them died asleep; the others hold neither weights nor keys and values."""
    engines = Engine(), Engine()

    async def run():
        publisher = colocated(engines, gpus=1)
        await publisher.pause_engines()
        await publisher._connect(engines[:1])
        await publisher._control.publish_file(1, "x")

    asyncio.run(run())
    paused = [("/pause", {"mode": "wait", "clear_cache": "true"}), ("/sleep", {"level": "1"})]
    assert engines[1].calls == paused
    assert engines[0].calls == [
        *paused,
        ("/wake_up", {"tags": "weights"}),
        ("/wake_up", {"tags": "kv_cache"}),
        ("/resume", None),
    ]


@pytest.mark.parametrize(("found_out", "attempts"), [("by rollouts", 1), ("paused", 2)])
def test_an_engine_that_died_is_not_asked_to_pause(found_out, attempts):
    engines = Engine(), Engine()

    async def run():
        publisher = colocated(engines, gpus=0)
        await publisher._connect(engines)
        engines[1].is_alive = False
        if found_out == "by rollouts":
            await publisher.engines.examine(publisher.engines.replicas[1], EngineError("gone"))
        await publisher.pause_engines()
        assert [replica.index for replica in publisher.engines.alive] == [0]
        await publisher.pause_engines()  # it is paused already

    asyncio.run(run())
    assert [path for path, _ in engines[0].calls] == ["/pause"] * attempts


def test_without_a_live_engine_nothing_is_paused():
    engine = Engine()
    engine.is_alive = False
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(colocated([engine], gpus=0).pause_engines())


def report(**found):
    return {"digests": {"0/0/1": "sent"}, "failure": "", "changed": [], "stream": 0} | found


@pytest.mark.parametrize(
    ("reports", "error", "told"),
    [
        ([report()], MismatchError, "1 of 2 workers of engine reported"),
        (
            [report(), report(failure="sender 0 died")],
            EngineError,
            "worker 1 of engine: sender 0 died",
        ),
        (
            [report(), report(changed=["a", "b"])],
            MismatchError,
            "2 of 0 tensors reached worker 1 of engine changed, the first is 'a'",
        ),
        (
            [report(), report(digests={"0/0/1": "other"})],
            MismatchError,
            "1 messages reached worker 1 of engine with other digests",
        ),
    ],
)
def test_every_worker_answers_for_itself(reports, error, told):
    """vLLM passes on what the first data-parallel engine says; the others' may have failed."""
    paths = []

    async def control(path, *args, **options):
        paths.append(path)
        return {"world_size": 2}

    async def call_workers(method):
        return reports

    async def send():
        return {"0/0/1": "sent", "1/0/1": "of others"}

    async def run():
        control_of_one = EngineControl(
            [SimpleNamespace(name="engine", control=control, call_workers=call_workers)]
        )
        control_of_one._world_sizes = await control_of_one._count_workers()
        with pytest.raises(error, match=told):
            await control_of_one.publish(1, send)

    asyncio.run(run())
    assert "/resume" not in paths
    assert ("/finish_weight_update" in paths) == (error is MismatchError)


@pytest.mark.parametrize(
    ("sleep", "expected"),
    [(True, ["/pause", "/sleep", "/wake_up", "/resume"]), (False, ["/pause", "/resume"])],
)
def test_a_judge_is_paused_between_uses(sleep, expected):
    calls = []

    async def control(path, *args, **options):
        calls.append(path)

    async def run():
        judges = EngineControl([SimpleNamespace(control=control)])
        await judges.pause(sleep=sleep)
        await judges.resume()

    asyncio.run(run())
    assert calls == expected


@pytest.mark.parametrize(
    ("seconds", "asleep", "holds"), [(1.0, False, True), (1.0, True, False), (90.0, False, False)]
)
def test_paused_engines_take_requests_unless_weights_take_long(seconds, asleep, holds):
    """A request's time limit begins when it is sent."""
    publisher = Publisher(recipe(rollout={"request_timeout_s": 600.0}), None, None, None)
    publisher._seconds = seconds
    assert not publisher.holds_requests
    publisher._control.paused, publisher._control.asleep = True, asleep
    assert publisher.holds_requests == holds


def test_a_check_asks_each_domains_adapter_and_says_whose_samples_these_are(tmp_path):
    """The trainer compares each domain's log-probs with those of its own adapters."""
    domains = ("math", "code")
    lora = {"rank": 4, "publish": "adapter", "per_domain": True}
    prompts = [Prompt("a", "code", "", (1, 2), ""), Prompt("b", "math", "", (3,), "")]
    asked = {}
    compared = []

    class Sampling(Engine):
        async def generate(self, token_ids, *, adapter, **settings):
            asked[tuple(token_ids)] = adapter
            logprobs = np.zeros(1, np.float32)
            spans = (VersionSpan(0, 0, 1),)
            return [Completion(np.array([1], np.int32), logprobs, spans, "length", "")]

    class Comparing:
        async def call(self, request):
            compared.append(SampleTable(request.directory))
            return LogprobComparison("", "", {"canary/abs_max": 0.0, "canary/abs_mean": 0.0})

    async def run():
        pool = ReplicaPool([Sampling()])
        config = recipe(domains, lora=lora)
        publisher = Publisher(config, RunDir(tmp_path), Comparing(), pool)
        await publisher.check_logprobs(prompts)

    asyncio.run(run())
    assert asked == {(1, 2): "policy.code", (3,): "policy.math"}
    [table] = compared
    assert table.domain.tolist() == [1, 0]
    assert table.manifest.domains == list(domains)


class Asked(Engine):
    """Says that it is alive; fails for the first `num_failures` of what it is asked."""

    def __init__(self, num_failures=0, answers_health=True):
        super().__init__()
        self.num_failures = num_failures
        self.is_alive = answers_health
        self.num_asked = 0

    async def generate(self, token_ids, **settings):
        self.num_asked += 1
        if not self.is_alive or self.num_asked <= self.num_failures:
            raise EngineUnreachable("gone")
        spans = (VersionSpan(0, 0, 1),)
        logprobs = np.zeros(1, np.float32)
        return [Completion(np.array([1], np.int32), logprobs, spans, "length", "")]


class Agreeing:
    async def call(self, request):
        return LogprobComparison("", "", {"canary/abs_max": 0.0, "canary/abs_mean": 0.0})


PROMPT = Prompt("a", "math", "", (1, 2), "")


def checked(tmp_path, pool):
    publisher = Publisher(recipe(("math",)), RunDir(tmp_path), Agreeing(), pool)
    return publisher.check_logprobs([PROMPT])


def test_one_that_could_not_be_checked_is_asked_again_when_another_has_died(tmp_path):
    failing, dead, well = Asked(num_failures=1), Asked(answers_health=False), Asked()
    pool = ReplicaPool([failing, dead, well])
    asyncio.run(checked(tmp_path, pool))
    assert [engine.num_asked for engine in (failing, dead, well)] == [2, 0, 1]
    assert [replica.index for replica in pool.alive] == [0, 2]


def test_one_that_fails_alone_ends_a_check(tmp_path):
    pool = ReplicaPool([Asked(num_failures=9), Asked()])
    with pytest.raises(EngineUnreachable):
        asyncio.run(checked(tmp_path, pool))


def test_one_that_joins_while_another_dies_does_not_hide_the_death(tmp_path):
    dead = Asked(answers_health=False)
    pool = ReplicaPool([dead, Asked()])

    async def health():
        pool.join(2, Asked())
        return False

    dead.health = health
    asyncio.run(checked(tmp_path, pool))
    assert [replica.index for replica in pool.alive] == [1, 2]
