"""Rollouts by workers: chunks, shards and records, lost workers, bad answers, full disks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batching import spool
from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.errors import EngineError, SetupError
from grpo_megatron.network import Endpoint
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.worker_client import WorkerClient, WorkerLost, WorkerPool
from grpo_megatron.rollout.worker_service import WorkerService, serve
from grpo_megatron.types import Prompt
from tests.rollout.engines import make_config
from tests.rollout.fake_engine import fake_engines
from tests.rollout.test_chunk_sampling import PROMPTS, _server_error, expected


def run(tmp_path, scenario, engines: int = 1, workers=None, **rollout):
    """Run `scenario(engines, pool, workers)` with fake engines and the real worker of each, which
    is served over HTTP. workers(index, service): what stands in its place."""

    async def main():
        config = make_config(max_new_tokens=4, **rollout)
        async with contextlib.AsyncExitStack() as stack:
            started = await stack.enter_async_context(fake_engines(engines))
            clients, serving, found = [], [], {}
            for index, engine in enumerate(started):
                engine.token = f"token of {index}"
                name = f"rollout-{index}"
                client = EngineClient(engine.url, name, request_timeout_s=2, token=engine.token)
                clients.append(await stack.enter_async_context(client))
                service = WorkerService(config, decode=lambda ids: ",".join(map(str, ids)))
                stack.push_async_callback(service.close)
                worker = workers(index, service) if workers else service
                file = tmp_path / f"worker-{index}.json"
                serving.append(asyncio.ensure_future(serve(worker, "127.0.0.1", file)))
                while not file.exists():
                    await asyncio.sleep(0.01)
                worker_client = WorkerClient(f"worker-{index}", Endpoint.read(file))
                found[index] = await stack.enter_async_context(worker_client)
            pool = ReplicaPool(clients, max_attempts=config.rollout.max_attempts)
            lost = []
            worker_pool = WorkerPool(found, on_death=lambda index, cause: lost.append(index))
            rollouts = ChunkDispatcher(config, pool, worker_pool, tmp_path / "rollouts")
            rollouts.lost = lost
            try:
                return await scenario(started, pool, rollouts)
            finally:
                for task in serving:
                    task.cancel()
                await asyncio.gather(*serving, return_exceptions=True)

    return asyncio.run(main())


def shards(tmp_path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("rollouts/*/*.safetensors"))


@pytest.mark.parametrize("engines", [1, 3])
def test_groups_come_in_prompt_order_as_records_of_files(tmp_path, engines):
    async def scenario(started, pool, rollouts):
        groups = await rollouts.rollouts(0, PROMPTS)
        return groups, shards(tmp_path)

    groups, files = run(tmp_path, scenario, engines)
    assert len(files) == engines
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        for child, completion in enumerate(group.completions):
            ids = expected(group.prompt, child)
            assert completion.token_ids.tolist() == ids
            assert completion.text == ",".join(map(str, ids))
            assert completion.num_tokens == 4 and completion.finish_reason == "length"
            assert [span.version for span in completion.versions] == [3]


@pytest.mark.parametrize(("max_tokens", "num_shards"), [(4, 2), (20_000, 5), (10_000_000, 10)])
def test_chunks_are_cut_by_their_size_and_for_balance(tmp_path, max_tokens, num_shards):
    """A prompt has four samples: 128 B, 640 kB and 320 MB of ids and log-probs."""

    async def scenario(started, pool, rollouts):
        for engine in started:
            engine.generate = stops_at_once(engine)
        await rollouts.rollouts(0, PROMPTS, max_tokens=max_tokens)
        return [g["sampling_params"]["max_tokens"] for e in started for g in e.requests]

    def stops_at_once(engine):
        async def generate(request):
            request["sampling_params"]["max_tokens"] = 4
            return await engine.answer(request)

        return generate

    cut = []

    def workers(index, service):
        class Counting:
            async def sample(self, chunk):
                cut.append(len(chunk.prompts))
                return await service.sample(chunk)

        return Counting()

    run(tmp_path, scenario, 2, workers, max_model_len=20_000_000)
    assert sum(cut) == 10 and len(cut) == num_shards


def test_a_slow_replica_takes_fewer_chunks(tmp_path):
    """The slow one answers its first chunk when nothing is left to be drawn."""
    served = [0, 0]

    def workers(index, service):
        class Slow:
            async def sample(self, chunk):
                if chunk.home == 1:
                    while served[0] < 4:
                        await asyncio.sleep(0.01)
                answer = await service.sample(chunk)
                served[chunk.home] += 1
                return answer

        return Slow()

    async def scenario(started, pool, rollouts):
        async with asyncio.timeout(300):
            return await rollouts.rollouts(0, PROMPTS, max_tokens=20_000)

    few = {"max_concurrent_requests": 1, "max_model_len": 20_000_000}
    groups = run(tmp_path, scenario, 2, workers, **few)
    assert [group.prompt for group in groups] == PROMPTS
    assert served == [4, 1]


def test_records_hold_no_array(tmp_path):
    """What the controller keeps of a sample does not grow with its tokens."""

    async def scenario(started, pool, rollouts):
        return await rollouts.rollouts(0, PROMPTS)

    groups = run(tmp_path, scenario)
    gc.collect()
    held = gc.get_referents(*[c for group in groups for c in group.completions])
    assert not any(isinstance(value, np.ndarray) for value in held)


def test_seeds_are_those_of_one_process(tmp_path):
    async def scenario(started, pool, rollouts):
        await rollouts.rollouts(2, PROMPTS)
        await rollouts.rollouts(2, PROMPTS[:1], samples=[range(1, 4)])
        return [request["sampling_params"]["seed"] for request in started[0].requests]

    seeds = run(tmp_path, scenario, deterministic=True)
    assert len(set(seeds)) == 40 and set(seeds[40:]) < set(seeds[:40])


def test_greedy(tmp_path):
    async def scenario(started, pool, rollouts):
        groups = await rollouts.greedy(PROMPTS, 4)
        return groups, {r["sampling_params"]["temperature"] for r in started[0].requests}

    groups, temperatures = run(tmp_path, scenario)
    assert temperatures == {0.0}
    assert [g.completions[0].token_ids.tolist() for g in groups] == [expected(p) for p in PROMPTS]


def test_files_go_with_the_last_record(tmp_path):
    async def scenario(started, pool, rollouts):
        return await rollouts.rollouts(0, PROMPTS[:2])

    groups = run(tmp_path, scenario)
    [kept] = [groups[1].completions[0]]
    del groups
    assert kept.token_ids.tolist() == expected(PROMPTS[1])
    del kept
    assert list((tmp_path / "rollouts").iterdir()) == []


class Dying:
    """A worker that has written a shard, and goes before it says so."""

    def __init__(self, service, calls: int):
        self.service, self.left = service, calls

    async def sample(self, chunk):
        self.left -= 1
        answer = await self.service.sample(chunk)
        if self.left < 0:
            raise asyncio.CancelledError  # the connection is closed without an answer
        return answer


def test_a_lost_worker_costs_its_chunk_and_nothing_counts_twice(tmp_path):
    async def scenario(started, pool, rollouts):
        groups = await rollouts.rollouts(0, PROMPTS)
        return groups, rollouts.lost, [replica.is_alive for replica in pool.replicas]

    def workers(index, service):
        return Dying(service, 0) if index == 1 else service

    groups, lost, alive = run(tmp_path, scenario, 2, workers)
    assert lost == [1] and alive == [True, True]
    assert [group.prompt for group in groups] == PROMPTS
    assert {len(group.completions) for group in groups} == {4}
    places = {(c.shard.path, c.index) for group in groups for c in group.completions}
    assert len(places) == 40


def test_a_worker_that_took_the_place_of_a_lost_one_stays():
    """A call of the one before it may end long after that has died."""
    lost = []
    earlier, later = SimpleNamespace(), SimpleNamespace()
    pool = WorkerPool({0: earlier}, on_death=lambda index, cause: lost.append(index))
    pool.lose(0, earlier, WorkerLost("worker-0 ended"))
    pool.add(0, later)
    pool.lose(0, earlier, WorkerLost("worker-0 ended"))
    assert lost == [0]
    assert pool.beside(0) == (0, later)


def test_the_last_lost_worker_is_an_error(tmp_path):
    async def scenario(started, pool, rollouts):
        with pytest.raises(EngineError, match="no rollout worker is alive"):
            await rollouts.rollouts(0, PROMPTS)

    run(tmp_path, scenario, 2, lambda index, service: Dying(service, 0))


def test_a_worker_that_the_supervisor_found_dead_is_left(tmp_path, monkeypatch):
    """A node that goes away closes no connection."""
    monkeypatch.setattr("grpo_megatron.rollout.worker_client._LOOK_S", 0.05)

    async def main():
        async def swallow(reader, writer):
            await asyncio.sleep(60)

        server = await asyncio.start_server(swallow, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "t")
        async with WorkerClient("worker-0", endpoint, is_alive=lambda: False) as client:
            with pytest.raises(WorkerLost, match="worker-0 ended"):
                await client.sample(None)
        server.close()

    asyncio.run(main())


def test_a_dead_engine_is_left_and_named(tmp_path):
    async def scenario(started, pool, rollouts):
        started[1].generate, started[1].healthy = _server_error, False
        groups = await rollouts.rollouts(0, PROMPTS)
        return groups, [r.is_alive for r in pool.replicas], pool.replicas[1].cause_of_death

    groups, alive, cause = run(tmp_path, scenario, engines=2)
    assert [g.prompt for g in groups] == PROMPTS and {g.replica for g in groups} == {0}
    assert alive == [True, False] and "rollout-1" in str(cause)


def test_the_last_dead_engine_is_an_error(tmp_path):
    async def scenario(started, pool, rollouts):
        started[0].generate, started[0].healthy = _server_error, False
        with pytest.raises(EngineError, match=r"no engine is alive: rollout-0 died because"):
            await rollouts.rollouts(0, PROMPTS)
        return pool.replicas[0].is_alive

    assert not run(tmp_path, scenario)


def test_prompts_of_an_engine_that_was_let_go_meanwhile_are_an_error(tmp_path):
    async def scenario(started, pool, rollouts):
        index, worker = rollouts.workers.beside(0)
        rollouts.workers.remove(index)
        rollouts.workers._can_wait = lambda: True  # it is started again
        running = asyncio.ensure_future(rollouts.rollouts(0, PROMPTS))
        await asyncio.sleep(0.05)
        pool.remove(0)
        rollouts.workers.add(index, worker)
        with pytest.raises(EngineError, match="no engine is alive: the last one has left"):
            await running
        with pytest.raises(EngineError, match="no engine is alive: the last one has left"):
            await rollouts.rollouts(0, PROMPTS)

    run(tmp_path, scenario)


def test_cancelling_ends_requests_in_flight(tmp_path):
    async def hang(_):
        await asyncio.sleep(60)

    async def scenario(started, pool, rollouts):
        started[0].generate = hang
        task = asyncio.ensure_future(rollouts.rollouts(0, PROMPTS))
        while started[0].running < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not started[0].running:
                break
            await asyncio.sleep(0.02)
        return started[0].running

    assert run(tmp_path, scenario) == 0
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_a_full_disk_is_one_message(tmp_path, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool, "write_shard", full)

    async def scenario(started, pool, rollouts):
        with pytest.raises(SetupError) as caught:
            await rollouts.rollouts(0, PROMPTS)
        return str(caught.value)

    said = run(tmp_path, scenario)
    assert "cannot write rollouts: No space left on device" in said
    assert "rollout-0-000.safetensors" in said and "free space" in said


def test_who_lacks_the_token_is_refused(tmp_path):
    async def scenario(started, pool, rollouts):
        known = Endpoint.read(tmp_path / "worker-0.json")
        async with WorkerClient("other", Endpoint(known.host, known.port, "guess")) as other:
            rollouts.workers = WorkerPool({0: other})
            with pytest.raises(EngineError, match="other answered with 401"):
                await rollouts.rollouts(0, PROMPTS)
        return len(started[0].requests)

    assert run(tmp_path, scenario) == 0


def test_nothing_is_asked_for_no_prompts(tmp_path):
    async def scenario(started, pool, rollouts):
        return await rollouts.rollouts(0, [])

    assert run(tmp_path, scenario) == []


def test_prompts_of_a_domain_keep_its_budget(tmp_path):
    async def scenario(started, pool, rollouts):
        domain = rollouts.config.domains[0].name
        await rollouts.rollouts(0, [Prompt("p", domain, "", (1,), "")], max_tokens=2)
        return [request["sampling_params"]["max_tokens"] for request in started[0].requests]

    assert run(tmp_path, scenario) == [2]


def test_an_environment_is_told_the_problem(tmp_path):
    """Over HTTP; other domains' problems stay with the controller."""
    told = []

    class Episodes:
        async def play(self, ask, prompt, seeds, max_tokens):
            told.append(prompt)
            (found,) = await ask(prompt.token_ids, n=1, max_tokens=max_tokens, routes_from=0)
            return found

    async def scenario(started, pool, rollouts):
        domain = rollouts.config.domains[0]
        environment = EnvironmentConfig(name="calculator")
        rollouts.config = rollouts.config.model_copy(
            update={"domains": (domain.model_copy(update={"environment": environment}),)}
        )
        metadata = {"expression": "1+1", "deep": [1, {"a": None}]}
        asked = [Prompt("p", domain.name, "text", (1, 2), "2", metadata, "1+1?")]
        asked.append(Prompt("q", "another", "text", (1, 3), "2", {"not": "sent"}, "1+1?"))
        return await rollouts.rollouts(0, asked)

    def workers(index, service):
        service._episodes = {"d": Episodes()}
        return service

    groups = run(tmp_path, scenario, workers=workers)
    assert len(told) == 4
    assert (told[0].question, told[0].answer) == ("1+1?", "2")
    assert told[0].metadata == {"expression": "1+1", "deep": [1, {"a": None}]}
    assert [group.prompt.prompt_id for group in groups] == ["p", "q"]


def test_what_environments_counted_adds_up_over_workers(tmp_path):
    """Each chunk's answer has what its worker counted since the one before, and names it once."""
    counted = []

    def workers(index, service):
        def take() -> dict[str, float]:
            counted.append(index)
            return {"environment/d/episodes": 2.0, f"environment/d/of_{index}": 1.0}

        service._environment_metrics = take
        return service

    async def scenario(started, pool, rollouts):
        await rollouts.rollouts(0, PROMPTS)
        first = rollouts.take_metrics()
        again = rollouts.take_metrics()
        return first, again

    first, again = run(tmp_path, scenario, 2, workers)
    assert first == {
        "environment/d/episodes": 2 * len(counted),
        "environment/d/of_0": counted.count(0),
        "environment/d/of_1": counted.count(1),
    }
    assert set(counted) == {0, 1} and again == {}


@pytest.mark.parametrize("engines", [1, 2])
def test_the_share_of_prompts_that_was_cached(tmp_path, engines):
    """A prompt counts once a sample; what goes on with a sample is also told apart."""

    async def scenario(started, pool, rollouts):
        for engine in started:
            engine.cached = lambda request: len(request["token_ids"]) - 1
        await rollouts.rollouts(0, PROMPTS)
        first = rollouts.take_metrics()
        for engine in started:
            engine.cached = lambda request: None
        await rollouts.rollouts(1, PROMPTS)
        return first, rollouts.take_metrics(), [r for e in started for r in e.requests]

    first, untold, requests = run(tmp_path, scenario, engines, segment_tokens=2)
    asked = requests[: len(requests) // 2]
    num_read = sum(r["sampling_params"]["n"] * len(r["token_ids"]) for r in asked)
    num_cached = sum(len(r["token_ids"]) - 1 for r in asked)
    later = [r for r in asked if r["sampling_params"]["n"] == 1]
    num_later = sum(len(r["token_ids"]) for r in later)
    assert first == {
        "prefix_cache/prompt_tokens": num_read,
        "prefix_cache/hit_fraction": num_cached / num_read,
        "prefix_cache/continued_hit_fraction": (num_later - len(later)) / num_later,
    }
    assert later and untold == {}
