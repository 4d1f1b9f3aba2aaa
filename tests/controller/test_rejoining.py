"""Servers and workers that return: who waits for them, and what they must have before they are
asked."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_megatron.controller import connecting, rejoining
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.rejoining import Rejoining
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.network import Endpoint
from grpo_megatron.rollout.client import EngineUnreachable
from grpo_megatron.rollout.members import read_unjoined, write_members
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.worker_client import WorkerPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event, read_events
from grpo_megatron.trainer.requests import JoinTransfer, SendWeights
from tests.controller.scored_groups import recipe
from tests.rollout.fake_engine import fake_engines


class Engine:
    """Notes what it is asked; holds the version that it loaded last."""

    def __init__(self, name="engine", checksums=None):
        self.name = self.base_url = name
        self.calls: list[str] = []
        self.is_alive = True
        self.checksums = checksums or {"0/weight": "a"}
        self.version = None
        self.is_closed = False

    async def control(self, path, *args, **options):
        if not self.is_alive:
            raise EngineUnreachable("gone")
        self.calls.append(path)

    async def call_workers(self, method, **arguments):
        await self.control(method)
        return []

    async def reset_prefix_cache(self):
        await self.control("reset")

    async def set_weight_version(self, version):
        await self.control(f"version {version}")
        self.version = version

    async def weight_checksums(self):
        await self.control("checksums")
        return self.checksums

    async def health(self):
        return self.is_alive

    async def close(self):
        self.is_closed = True


class Trainer:
    """Every request takes a moment; notes them."""

    def __init__(self):
        self.calls: list[str] = []

    async def call(self, request):
        self.calls.append(request.name)
        await asyncio.sleep(0)


def publisher(tmp_path, engines, can_return=True, **settings) -> Publisher:
    config = recipe(publish={"method": "file"}, **settings)
    pool = ReplicaPool(engines, may_return=lambda index: can_return)
    return Publisher(config, RunDir(tmp_path), Trainer(), pool)


async def die(publisher, index):
    [replica] = [one for one in publisher.engines.replicas if one.index == index]
    replica.client.is_alive = False
    await publisher.engines.examine(replica, EngineError("gone"))


def test_one_that_returns_has_the_weights_of_the_others_before_it_is_asked(tmp_path):
    first, second, again = Engine("r0"), Engine("r1"), Engine("r1")

    async def run():
        owner = publisher(tmp_path, [first, second])
        await owner.publish(3)
        await die(owner, 1)
        before = list(first.calls)
        await owner.join(1, again)
        assert again.version == 3 and again.calls[-2:] == ["/resume", "checksums"]
        assert first.calls == [*before, "checksums"]  # it went on meanwhile
        assert [replica.client for replica in owner.engines.alive] == [first, again]
        assert owner.unchecked == {1}
        await owner.publish(4)
        assert first.version == again.version == 4

    asyncio.run(run())


def test_one_that_holds_other_weights_does_not_join(tmp_path):
    first, second = Engine("r0"), Engine("r1")
    wrong = Engine("r1", {"0/weight": "b"})

    async def run():
        owner = publisher(tmp_path, [first, second])
        await owner.publish(3)
        await die(owner, 1)
        with pytest.raises(MismatchError, match="of r1 differs from that of r0"):
            await owner.join(1, wrong)
        assert [replica.client for replica in owner.engines.alive] == [first]

    asyncio.run(run())


def test_replicas_of_other_layouts_are_not_compared(tmp_path):
    first, second = Engine("r0"), Engine("r1")
    wider = Engine("r1", {"0/weight": "b", "1/weight": "c"})

    async def run():
        owner = publisher(tmp_path, [first, second])
        await owner.publish(3)
        await die(owner, 1)
        await owner.join(1, wider)

    asyncio.run(run())


def test_who_joins_waits_until_trainer_and_engines_have_one_version(tmp_path):
    engine, again = Engine("r0"), Engine("r0")

    async def run():
        owner = publisher(tmp_path, [engine])
        early = asyncio.create_task(owner.join(0, again))
        await asyncio.sleep(0.05)
        assert again.calls == []  # nothing was published yet
        early.cancel()
        await owner.publish(0)
        await die(owner, 0)
        trained = asyncio.Event()

        async def train():
            async with owner.training():
                await trained.wait()

        training = asyncio.create_task(train())
        await asyncio.sleep(0.05)
        joining = asyncio.create_task(owner.join(0, again))
        await asyncio.sleep(0.5)
        is_in_training = again.calls == []
        trained.set()
        await training
        await asyncio.sleep(0.5)
        is_before_publish = again.calls == []
        await owner.publish(1)  # into nobody
        assert owner.engines.alive == []
        await joining
        return is_in_training, is_before_publish

    assert asyncio.run(run()) == (True, True)
    assert again.version == 1


@pytest.mark.parametrize("after", ["in training", "in a publish"])
def test_one_joins_although_a_step_begins_as_soon_as_its_weights_are_published(tmp_path, after):
    engine, again, third = Engine("r0"), Engine("r1"), Engine("r2")

    async def run():
        owner = publisher(tmp_path, [engine, None, None])
        await owner.publish(0)
        joining = []

        def join():
            for index, client in [(1, again), (2, third)]:
                joining.append(asyncio.create_task(owner.join(index, client)))

        for version in range(1, 4):
            async with owner.training():
                if version == 1 and after == "in training":
                    join()
                await asyncio.sleep(0.01)
            if version == 1 and after == "in a publish":
                join()
            await owner.publish(version)
        assert all(task.done() for task in joining)
        await asyncio.gather(*joining)
        return [replica.index for replica in owner.engines.alive]

    assert asyncio.run(run()) == [0, 1, 2]
    assert engine.version == again.version == third.version == 3


@pytest.mark.parametrize("how", ["dies", "is cancelled"])
def test_one_that_does_not_join_holds_no_training_back(tmp_path, how):
    engine, again = Engine("r0"), Engine("r0")

    async def run():
        owner = publisher(tmp_path, [engine])
        joining = asyncio.create_task(owner.join(0, again))
        await asyncio.sleep(0.01)
        if how == "dies":
            again.is_alive = False
        else:
            joining.cancel()
        await owner.publish(0)
        async with asyncio.timeout(60):
            async with owner.training():
                pass
            await owner.remove(0)
            [error] = await asyncio.gather(joining, return_exceptions=True)
        return type(error)

    expected = {"dies": EngineUnreachable, "is cancelled": asyncio.CancelledError}
    assert asyncio.run(run()) is expected[how]


def test_training_waits_for_weights_on_their_way(tmp_path):
    """Else these would be those after the step, under the version before it."""
    engine, again = Engine("r0"), Engine("r0")
    order = []

    async def run():
        owner = publisher(tmp_path, [engine])
        await owner.publish(0)
        await die(owner, 0)
        sent = asyncio.Event()

        async def slow(path, *args, **options):
            await sent.wait()

        again.control = slow
        joining = asyncio.create_task(owner.join(0, again))
        await asyncio.sleep(0.05)

        async def train():
            async with owner.training():
                order.append("train")

        training = asyncio.create_task(train())
        await asyncio.sleep(0.05)
        order.append("sent")
        sent.set()
        await asyncio.gather(joining, training)

    asyncio.run(run())
    assert order == ["sent", "train"]


def test_what_a_publish_sent_is_not_what_one_that_joined_was_sent(tmp_path):
    engine, again = Engine("r0"), Engine("r1")
    engine.control = again.control = _no_workers
    num_sent = 3

    class Sending:
        async def call(self, request):
            if isinstance(request, SendWeights):
                return SimpleNamespace(num_bytes=10, num_sent_bytes=num_sent, digests={})
            if isinstance(request, JoinTransfer):
                return {}
            return []

    async def run():
        nonlocal num_sent
        config = recipe(publish={"method": "gloo", "delta": True})
        pool = ReplicaPool([engine, None], may_return=lambda index: True)
        owner = Publisher(config, RunDir(tmp_path), Sending(), pool)
        await owner.publish(0)
        num_sent = 10  # the whole
        await owner.join(1, again)
        assert owner.sent_fraction == 0.3
        await owner.publish(1)
        assert owner.sent_fraction == 1.0

    asyncio.run(run())


async def _no_workers(path, *args, **options):
    return {"world_size": 0}


@pytest.mark.parametrize("how", ["dies", "is removed"])
def test_weights_are_not_published_where_no_engine_is_left(tmp_path, how):
    async def run():
        owner = publisher(tmp_path, [Engine("r0")], can_return=False)
        await owner.publish(0)
        if how == "dies":
            await die(owner, 0)
        else:
            await owner.remove(0)
        for work in (
            owner.pause_engines,
            partial(owner.publish, 1),
            partial(owner.check_logprobs, []),
        ):
            with pytest.raises(EngineError, match="no engine is alive"):
                await work()
        assert owner.version == 0

    asyncio.run(run())


@pytest.mark.parametrize("can_return", [False, True])
def test_the_only_engine_dies_in_training(tmp_path, can_return):
    engine = Engine("r0")

    async def run():
        owner = publisher(tmp_path, [engine], can_return)
        await owner.publish(0)
        engine.is_alive = False
        await owner.pause_engines()
        await owner.publish(1)
        assert owner.version == 1 and owner.engines.alive == []

    if can_return:
        asyncio.run(run())
    else:
        with pytest.raises(EngineError, match="gone"):
            asyncio.run(run())


def test_what_is_wrong_with_one_that_returned_ends_the_run(tmp_path):
    engine = Engine("r0")

    async def run():
        owner = publisher(tmp_path, [engine])
        await owner.publish(0)
        await die(owner, 0)
        owner.engines.failure = MismatchError("other weights")
        with pytest.raises(MismatchError):
            await owner.publish(1)
        with pytest.raises(MismatchError):
            await owner.engines.wait_alive()

    asyncio.run(run())


def test_a_pool_waits_for_one_that_may_return(tmp_path):
    engine, again = Engine("r0"), Engine("r0")
    may_return = [True]

    async def run():
        pool = ReplicaPool([engine], may_return=lambda index: may_return[0])
        engine.is_alive = False
        await pool.examine(pool.replicas[0], EngineError("gone"))
        waiting = asyncio.create_task(pool.wait_alive())
        await asyncio.sleep(0.3)
        assert not waiting.done() and pool.can_wait
        pool.join(0, again)
        await waiting
        assert pool.pick().client is again
        again.is_alive = False
        await pool.examine(pool.replicas[0], EngineError("gone"))
        waiting = asyncio.create_task(pool.wait_alive())
        may_return[0] = False
        with pytest.raises(EngineError, match="no engine is alive"):
            await waiting

    asyncio.run(run())


@contextlib.asynccontextmanager
async def joined(tmp_path, engines, workers, owner, **rollout):
    config = recipe(rollout=rollout)
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    async with Rejoining(config, run_dir, engines, workers, owner):
        yield run_dir


class Joins:
    """In the place of a publisher: lets an engine join at once."""

    version = 5

    def __init__(self, pool):
        self.pool = pool

    async def join(self, index, client):
        self.pool.join(index, client)

    async def remove(self, index):
        self.pool.remove(index)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def publish_address(run_dir, name, url, token=""):
    host, _, port = url.removeprefix("http://").partition(":")
    Endpoint(host, int(port), token).write(run_dir.endpoints / f"{name}.json")


def test_a_new_address_is_connected_to_and_an_old_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)

    async def run():
        async with fake_engines(2) as [old, new]:
            dead = Engine("rollout-0")
            pool = ReplicaPool([dead], may_return=lambda index: True)
            workers = WorkerPool({0: SimpleNamespace()})
            async with joined(tmp_path, pool, workers, Joins(pool)) as run_dir:
                old.healthy = False
                publish_address(run_dir, "rollout-0", old.url)
                dead.is_alive = False
                await pool.examine(pool.replicas[0], EngineError("gone"))
                await asyncio.sleep(0.3)
                assert not pool.alive
                (run_dir.endpoints / "rollout-0.json").unlink()  # the supervisor does
                await asyncio.sleep(0.3)
                publish_address(run_dir, "rollout-0", new.url, "its own token")
                await until(lambda: pool.alive)
                assert pool.alive[0].client.base_url == new.url
                assert pool.alive[0].client.token == "its own token"
                await until(lambda: run_dir.events.exists())
            [event] = read_events(run_dir.events)
            assert (event["kind"], event["role"]) == ("joined", "rollout-0")
            assert event["version"] == 5

    asyncio.run(run())


def test_one_that_is_given_up_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)

    async def run():
        dead = Engine("rollout-0")
        pool = ReplicaPool([dead], may_return=lambda index: True)
        workers = WorkerPool({0: SimpleNamespace()})
        config = recipe()
        run_dir = RunDir(tmp_path, "1")
        run_dir.create()
        seeing = Rejoining(config, run_dir, pool, workers, Joins(pool))
        async with seeing:
            dead.is_alive = False
            await pool.examine(pool.replicas[0], EngineError("gone"))
            (run_dir.endpoints / "rollout-0.dead").touch()
            await until(lambda: seeing._tasks[0][0].done())

    asyncio.run(run())


@pytest.mark.parametrize("error", [MismatchError("other weights"), KeyError("a mistake of ours")])
def test_one_that_cannot_be_trusted_fails_the_pool(tmp_path, monkeypatch, error):
    """Else a run without another engine would wait for ever."""
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)

    class Refuses(Joins):
        async def join(self, index, client):
            raise error

    async def run():
        async with fake_engines() as [new]:
            dead = Engine("rollout-0")
            pool = ReplicaPool([dead], may_return=lambda index: True)
            workers = WorkerPool({0: SimpleNamespace()})
            dead.is_alive = False
            await pool.examine(pool.replicas[0], EngineError("gone"))
            async with joined(tmp_path, pool, workers, Refuses(pool)) as run_dir:
                publish_address(run_dir, "rollout-0", new.url)
                async with asyncio.timeout(60):
                    await pool.wait_alive()

    with pytest.raises((MismatchError, EngineError), match=str(error.args[0])):
        asyncio.run(run())


def test_what_ends_the_task_that_sees_to_a_worker_fails_the_pool(tmp_path, monkeypatch):
    async def broken(*arguments):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(rejoining, "connect_worker", broken)

    async def run():
        pool = ReplicaPool([Engine("rollout-0")])
        async with joined(tmp_path, pool, WorkerPool({}), Joins(pool)):
            await until(lambda: pool.failure is not None)
        return pool.failure

    failure = asyncio.run(run())
    assert isinstance(failure, EngineError) and "cannot see to worker-0" in str(failure)
    assert "Stale file handle" in str(failure)


def test_a_file_system_that_fails_for_a_moment_declares_nobody_dead(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "exists", fail)
    assert connecting.is_expected(RunDir(tmp_path, "1"), "rollout-0")


def test_without_restarts_nobody_is_looked_for(tmp_path):
    async def run():
        pool = ReplicaPool([Engine()])
        config = recipe(rollout={"max_restarts": 0})
        seeing = Rejoining(config, RunDir(tmp_path, "1"), pool, WorkerPool({}), Joins(pool))
        async with seeing:
            assert seeing._tasks == {}

    asyncio.run(run())


def test_one_that_is_added_joins_whatever_the_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)

    async def run():
        async with fake_engines() as [new]:
            pool = ReplicaPool([Engine("rollout-0")])
            workers = WorkerPool({0: SimpleNamespace()})
            async with joined(tmp_path, pool, workers, Joins(pool), max_restarts=0) as run_dir:
                write_members(run_dir, {0: "present", 2: "present"})
                publish_address(run_dir, "rollout-2", new.url)
                publish_address(run_dir, "worker-2", new.url)
                await until(lambda: pool.is_alive(2) and workers.has(2))
            assert [replica.index for replica in pool.taking] == [0, 2]

    asyncio.run(run())


def test_one_that_was_added_before_the_others_were_connected_has_joined(tmp_path):
    async def run():
        run_dir = RunDir(tmp_path, "1")
        run_dir.create()
        for kind, role in (
            ("started", "rollout-0"),
            ("started", "controller"),
            ("added", "rollout-1"),
            ("added", "rollout-2"),
            ("added", "rollout-3"),
        ):
            append_event(run_dir.events, kind, role=role)
        write_members(run_dir, dict.fromkeys(range(4), "present"))
        pool = ReplicaPool([Engine("rollout-0"), Engine("rollout-1"), Engine("rollout-2")])
        await die(SimpleNamespace(engines=pool), 2)
        config = recipe(rollout={"max_restarts": 0})
        async with Rejoining(config, run_dir, pool, WorkerPool({}), Joins(pool)):
            assert read_unjoined(run_dir) == {"rollout-2", "rollout-3"}
        [event] = [event for event in read_events(run_dir.events) if event["kind"] == "joined"]
        assert event["role"] == "rollout-1"

    asyncio.run(run())


def test_one_that_leaves_answers_what_it_was_asked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)
    shown = []
    monkeypatch.setattr(rejoining, "show", lambda kind, **fields: shown.append((kind, fields)))

    async def run():
        pool = ReplicaPool([Engine("rollout-0"), Engine("rollout-1")])
        workers = WorkerPool({0: SimpleNamespace(), 1: SimpleNamespace()})
        leaving = pool.replicas[1]
        leaving.in_flight = 1
        async with joined(tmp_path, pool, workers, Joins(pool)) as run_dir:
            write_members(run_dir, {0: "present", 1: "leaving"})
            await until(lambda: leaving.is_leaving)
            await asyncio.sleep(0.3)
            assert [replica.index for replica in pool.taking] == [0]
            assert [replica.index for replica in pool.alive] == [0, 1]  # it gets weights
            leaving.in_flight = 0
            await until(lambda: shown)
            assert shown == [("left", {"engine": 1})]
            assert [replica.index for replica in pool.alive] == [0]
            assert not leaving.is_alive and not workers.has(1)
            # and may come again
            write_members(run_dir, {0: "present"})
            await until(lambda: pool.find(1) is None)

    asyncio.run(run())


def test_the_last_one_that_is_alive_stays_although_it_is_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(rejoining, "_LOOK_S", 0.05)

    async def run():
        first = Engine("rollout-0")
        pool = ReplicaPool([first, Engine("rollout-1")], may_return=lambda index: True)
        workers = WorkerPool({0: SimpleNamespace(), 1: SimpleNamespace()})
        first.is_alive = False
        await pool.examine(pool.replicas[0], EngineError("gone"))
        async with joined(tmp_path, pool, workers, Joins(pool)) as run_dir:
            write_members(run_dir, {0: "present", 1: "leaving"})
            await until(lambda: pool.replicas[1].is_leaving)
            await asyncio.sleep(0.3)
            assert [replica.index for replica in pool.taking] == [1]
            pool.join(0, Engine("rollout-0"))
            await until(lambda: [replica.index for replica in pool.alive] == [0])

    asyncio.run(run())


def test_weights_go_only_to_those_that_are_there(tmp_path):
    first, second = Engine("r0"), Engine("r1")

    async def run():
        owner = publisher(tmp_path, [first, second])
        await owner.publish(3)
        async with owner.training():
            leaving = asyncio.create_task(owner.remove(1))
            await asyncio.sleep(0.1)
            assert not leaving.done()  # engines pause together meanwhile
            await owner.pause_engines()
        await leaving
        await owner.publish(4)
        assert (first.version, second.version) == (4, 3)
        assert await owner.engines.wait_alive() is None

    asyncio.run(run())


def test_engines_that_share_gpus_with_the_trainer_are_not_started_again():
    gpus = {"mode": "colocated", "gpus_per_node": 1}
    assert recipe(placement=gpus).engine_restarts == 0
    assert recipe(placement={"mode": "colocated"}).engine_restarts == 3
    assert recipe(rollout={"max_restarts": 1}).engine_restarts == 1
