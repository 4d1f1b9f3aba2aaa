"""Scheduling over replicas with fake engines: order, retries, death, cancellation, shards."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.chunk_sampling import ChunkSampler
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.types import Prompt
from tests.rollout.engines import make_config
from tests.rollout.fake_engine import answer, fake_engines

PROMPTS = [Prompt(f"p{i}", "d", "", (i, i + 1), "") for i in range(10)]


def run(scenario, engines: int = 1, **rollout):
    """Run `scenario(engines, pool, worker)` with clients of fake engines."""

    async def main():
        async with fake_engines(engines) as started:
            clients = [
                EngineClient(e.url, name=f"replica {i}", request_timeout_s=2)
                for i, e in enumerate(started)
            ]
            config = make_config(max_new_tokens=4, **rollout)
            pool = ReplicaPool(clients, max_attempts=config.rollout.max_attempts)
            try:
                return await scenario(started, pool, ChunkSampler(config, pool))
            finally:
                for client in clients:
                    await client.close()

    return asyncio.run(main())


def expected(prompt: Prompt, child: int = 0, seed: int = 0) -> list[int]:
    request = {
        "token_ids": prompt.token_ids,
        "sampling_params": {"n": child + 1, "max_tokens": 4, "seed": seed},
    }
    return answer(request)["choices"][child]["token_ids"]


@pytest.mark.parametrize("engines", [1, 3])
def test_groups_come_in_prompt_order(engines):
    async def scenario(started, pool, worker):
        for i, engine in enumerate(started):
            engine.delay_s = 0.02 * i
        return await worker.rollouts(0, PROMPTS)

    groups = run(scenario, engines)
    assert [g.prompt for g in groups] == PROMPTS
    for group in groups:
        assert [c.token_ids.tolist() for c in group.completions] == [
            expected(group.prompt, child) for child in range(4)
        ]


def test_deterministic_mode_sends_one_seeded_request_a_sample():
    async def scenario(started, pool, worker):
        first = await worker.rollouts(2, PROMPTS)
        again = await worker.rollouts(2, PROMPTS[::-1])
        other = await worker.rollouts(3, PROMPTS)
        return started[0].requests, first, again, other

    requests, first, again, other = run(scenario, deterministic=True)
    assert len(requests) == 3 * 40 and {r["sampling_params"]["n"] for r in requests} == {1}
    seeds = {r["sampling_params"]["seed"] for r in requests}
    assert len(seeds) == 80 and all(0 <= s < 2**31 for s in seeds)
    ids = [[c.token_ids.tolist() for c in g.completions] for g in first]
    assert ids == [[c.token_ids.tolist() for c in g.completions] for g in again[::-1]]
    assert ids != [[c.token_ids.tolist() for c in g.completions] for g in other]


def test_samples_that_come_later_have_the_seeds_of_their_numbers():
    async def scenario(started, pool, worker):
        whole = await worker.rollouts(2, PROMPTS[:2])
        first = await worker.rollouts(2, PROMPTS[:2], samples=[range(1), range(2)])
        later = await worker.rollouts(2, PROMPTS[:2], samples=[range(1, 4), range(2, 4)])
        return whole, first, later

    whole, first, later = run(scenario, deterministic=True)
    assert [len(group.completions) for group in (*first, *later)] == [1, 2, 3, 2]
    for group, start, end in zip(whole, first, later, strict=True):
        parts = (*start.completions, *end.completions)
        assert [c.token_ids.tolist() for c in parts] == [
            c.token_ids.tolist() for c in group.completions
        ]


@pytest.mark.parametrize("engines", [1, 3])
def test_prompts_may_have_different_numbers_of_samples(engines):
    async def scenario(started, pool, worker):
        return await worker.rollouts(0, PROMPTS, samples=[range(1 + i % 3) for i in range(10)])

    groups = run(scenario, engines)
    assert [len(group.completions) for group in groups] == [1 + i % 3 for i in range(10)]
    for group in groups:
        ids = [completion.token_ids.tolist() for completion in group.completions]
        assert ids == [expected(group.prompt, child) for child in range(len(ids))]


def test_concurrency_is_bounded():
    async def scenario(started, pool, worker):
        started[0].delay_s = 0.01
        await worker.rollouts(0, PROMPTS)
        return started[0].most_running

    assert run(scenario, max_concurrent_requests=3) == 3


async def _server_error(_):
    return web.Response(status=500, text="engine core died")


async def _hang(_):
    await asyncio.sleep(60)


async def _break_connection(_):
    raise ConnectionResetError  # aiohttp drops the connection


@pytest.mark.parametrize("failure", [_server_error, _hang, _break_connection])
def test_a_dead_replica_is_left_and_named(failure):
    async def scenario(started, pool, worker):
        started[1].generate, started[1].healthy = failure, False
        groups = await worker.rollouts(0, PROMPTS)
        return groups, [r.is_alive for r in pool.replicas], pool.replicas[1].cause_of_death

    groups, alive, cause = run(scenario, engines=2)
    assert [g.prompt for g in groups] == PROMPTS and {g.replica for g in groups} == {0}
    assert alive == [True, False] and "replica 1" in str(cause)


def test_a_stopped_server_is_left():
    async def scenario(started, pool, worker):
        await started[0].stop()
        return await worker.rollouts(0, PROMPTS)

    assert {g.replica for g in run(scenario, engines=2)} == {1}


def test_a_passing_failure_is_retried_on_the_only_replica():
    async def scenario(started, pool, worker):
        engine, failed = started[0], set()

        async def once(request):
            key = tuple(request["token_ids"])
            if key not in failed:
                failed.add(key)
                return await _server_error(request)
            return await engine.answer(request)

        engine.generate = once
        return await worker.rollouts(0, PROMPTS), pool.replicas[0].is_alive

    groups, alive = run(scenario)
    assert len(groups) == 10 and alive


def test_attempts_are_limited():
    async def scenario(started, pool, worker):
        started[0].generate = _server_error
        with pytest.raises(EngineError, match=r"replica 0 answered .* 500") as caught:
            await worker.rollouts(0, PROMPTS[:1])
        return len(started[0].requests), caught.value.__notes__

    assert run(scenario, max_attempts=2) == (2, ["after 2 attempts"])


def test_the_last_death_is_named():
    async def scenario(started, pool, worker):
        for engine in started:
            engine.generate, engine.healthy = _server_error, False
        with pytest.raises(EngineError, match="no engine is alive: all 2 died") as caught:
            await worker.rollouts(0, PROMPTS)
        with pytest.raises(EngineError, match="no engine is alive"):
            await worker.greedy(PROMPTS, 4)
        return str(caught.value)

    assert "replica" in run(scenario, engines=2)


def test_refused_requests_are_not_retried():
    async def refuse(_):
        return web.Response(status=400, text="prompt is too long")

    async def scenario(started, pool, worker):
        started[0].generate = refuse
        with pytest.raises(EngineError, match="prompt is too long"):
            await worker.rollouts(0, PROMPTS[:1])
        return len(started[0].requests), pool.replicas[0].is_alive

    assert run(scenario) == (1, True)


def test_cancelling_ends_requests_in_flight():
    async def scenario(started, pool, worker):
        started[0].generate = _hang
        task = asyncio.ensure_future(worker.rollouts(0, PROMPTS))
        while started[0].running < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        return started[0].running, started[0].cancelled, pool.replicas[0].in_flight

    running, cancelled, in_flight = run(scenario, max_concurrent_requests=5)
    assert (running, cancelled, in_flight) == (0, 5, 0)


def test_greedy_asks_for_one_completion_at_temperature_0():
    async def scenario(started, pool, worker):
        groups = await worker.greedy(PROMPTS, 4)
        return [g.completions[0] for g in groups], started[0].requests

    completions, requests = run(scenario)
    assert [c.token_ids.tolist() for c in completions] == [expected(p) for p in PROMPTS]
    assert {(r["sampling_params"]["n"], r["sampling_params"]["temperature"]) for r in requests} == {
        (1, 0.0)
    }


def test_a_domain_has_its_own_length_budget():
    async def scenario(started, pool, worker):
        domain = worker.config.domains[0].model_copy(update={"max_new_tokens": 2})
        worker.config = worker.config.model_copy(update={"domains": (domain,)})
        other = Prompt("q", "elsewhere", "", (7,), "")
        await worker.rollouts(0, [PROMPTS[0], other])
        await worker.greedy([PROMPTS[0]], 4)
        return started[0].requests

    requests = run(scenario)
    assert sorted((r["sampling_params"]["max_tokens"], len(r["token_ids"])) for r in requests) == [
        (2, 2),
        (2, 2),
        (4, 1),
    ]


class Twice:
    """An episode of two requests: the second one answers what the first one said."""

    def __init__(self):
        self.seeds = []

    async def play(self, ask, prompt, seeds, max_tokens):
        self.seeds.append((prompt.prompt_id, seeds))
        settings = {"n": 1, "max_tokens": max_tokens, "seed": seeds.turns, "routes_from": 0}
        (first,) = await ask(prompt.token_ids, **settings)
        (second,) = await ask([*prompt.token_ids, *first.token_ids.tolist()], **settings)
        return second


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_with_an_environment_are_asked_turn_by_turn(deterministic):
    plain = [Prompt(f"q{i}", "plain", "", (i, i + 7), "") for i in range(3)]
    mixed = [PROMPTS[0], plain[0], PROMPTS[1], plain[1], plain[2]]

    async def scenario(started, pool, worker):
        worker.episodes = {"d": Twice()}
        groups = await worker.rollouts(3, mixed)
        return groups, worker.episodes["d"].seeds, started[0].requests

    groups, seeds, requests = run(scenario, deterministic=deterministic)
    assert [group.prompt for group in groups] == mixed
    assert [len(group.completions) for group in groups] == [4] * 5
    assert len(seeds) == 8  # one an episode
    of_environment = {}
    for prompt_id, found in seeds:
        of_environment.setdefault(prompt_id, set()).add(found.environment)
    assert all(len(of_group) == 1 for of_group in of_environment.values())
    assert len(set.union(*of_environment.values())) == 2
    turns = {found.turns for _, found in seeds}
    assert turns == {None} if not deterministic else len(turns) == 8
    num_plain = 12 if deterministic else 3
    assert len(requests) == 2 * 8 + num_plain
    for group in (groups[0], groups[2]):
        for completion in group.completions:
            assert completion.num_tokens == 4


@pytest.mark.parametrize("way", ["rollouts", "greedy", "episodes"])
def test_requests_name_the_adapter_of_their_prompts_domain(way):
    """Of samples, of evaluations, and of turns with an environment."""
    lora = LoraConfig(rank=4, publish="adapter", per_domain=True)
    prompts = [Prompt(f"p{i}", ("math", "code")[i % 2], "", (i, i + 1), "") for i in range(6)]

    class Once:
        async def play(self, ask, prompt, seeds, max_tokens):
            [completion] = await ask(prompt.token_ids, n=1, max_tokens=max_tokens, seed=1)
            return completion

    async def scenario(started, pool, worker):
        config = make_config(("math", "code"), max_new_tokens=4)
        worker.config = config.model_copy(update={"lora": lora})
        if way == "episodes":
            worker.episodes = {"code": Once()}
        if way == "greedy":
            await worker.greedy(prompts, 4)
        else:
            await worker.rollouts(0, prompts)
        return started[0].requests

    requests = run(scenario)
    asked = {}
    for request in requests:
        asked[tuple(request["token_ids"])] = request["model"]
    assert asked == {p.token_ids: f"policy.{p.domain}" for p in prompts}


def test_requests_of_merged_weights_name_no_adapter():
    async def scenario(started, pool, worker):
        worker.config = worker.config.model_copy(update={"lora": LoraConfig(rank=4)})
        await worker.rollouts(0, PROMPTS[:1])
        return started[0].requests

    assert all("model" not in request for request in run(scenario))
