"""Reward processes of other nodes: one queue, lost hosts, texts in files."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.spool import store_groups
from grpo_megatron.errors import RewardError
from grpo_megatron.network import Endpoint
from grpo_megatron.rewards import reward_host
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.types import Completion, Prompt, RolloutGroup, Turn, VersionSpan
from tests.rewards.reward_pools import HOSTILE, domain, group

OBEY = f"{HOSTILE}:obey"
PID = f"{HOSTILE}:process_number"


class Host:
    """A reward host in a process of its own, as on another node."""

    def __init__(self, directory: Path, index: int):
        self.file = directory / f"reward-host-{index}.json"
        self.log = directory / f"rewards-{index}.log"

    async def start(self) -> Endpoint:
        code = (
            "import asyncio, sys; from pathlib import Path\n"
            "from grpo_megatron.rewards.reward_host import serve\n"
            "asyncio.run(serve('127.0.0.1', Path(sys.argv[1]), Path(sys.argv[2])))"
        )
        self.process = await asyncio.create_subprocess_exec(
            *(os.sys.executable, "-c", code, str(self.file), str(self.log))
        )
        while not self.file.exists():
            await asyncio.sleep(0.02)
        return Endpoint.read(self.file)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def run(tmp_path, scenario, count: int = 2, functions=(OBEY,), **options):
    """Run `scenario(hosts, pool)` with a pool of processes of `count` hosts."""

    async def main():
        hosts = [Host(tmp_path, index) for index in range(count)]
        try:
            endpoints = [await host.start() for host in hosts]
            settings = {"num_workers": 1, "timeout_s": 60.0} | options
            async with RewardPool([domain(*functions)], hosts=endpoints, **settings) as pool:
                return await scenario(hosts, pool)
        finally:
            for host in hosts:
                await host.kill()

    return asyncio.run(main())


def test_processes_of_all_hosts_are_one_pool(tmp_path):
    async def scenario(hosts, pool):
        return await pool.score([group([str(n) for n in range(200)])])

    [scored] = run(tmp_path, scenario, functions=(OBEY, PID), num_workers=2)
    assert scored.components["obey"].tolist() == list(range(200))
    assert 1 < len(set(scored.components["process_number"])) <= 4


def episode(text, answer):
    """A group of one episode: the text is a call, its result and the answer behind it."""
    token_ids = np.array([ord(character) for character in text], np.int32)
    num_before = len(text) - len(answer)
    logprobs = np.full(len(text), -1.0, np.float32)
    logprobs[1:num_before] = np.nan
    completion = Completion(
        token_ids,
        logprobs,
        (VersionSpan(0, 0, len(text)),),
        "stop",
        answer,
        turns=(Turn(0, 1), Turn(num_before, len(text))),
    )
    return RolloutGroup(Prompt("p", "d", "", (1, 2), answer), (completion,), 0)


def test_of_an_episode_rewards_see_the_last_turn(tmp_path):
    sampled = [episode("c408408", "408")]
    stored = store_groups(tmp_path / "rollouts", sampled)
    functions = "grpo_megatron.rewards.functions:"
    domains = [
        domain(f"{HOSTILE}:of_last_turn", f"{functions}exact_match", f"{functions}numeric_match")
    ]

    async def run():
        async with RewardPool(domains) as pool:
            return [*await pool.score(sampled), *await pool.score(stored)]

    for scored in asyncio.run(run()):
        values = {name: float(value[0]) for name, value in scored.components.items()}
        assert values == {"of_last_turn": 4.0, "exact_match": 1.0, "numeric_match": 1.0}


def test_texts_and_token_ids_are_read_from_files(tmp_path):
    """Token ids of the made group are [0]."""
    stored = store_groups(tmp_path / "rollouts", [group(["3", "é\ud800", "5"])])

    async def scenario(hosts, pool):
        return await pool.score(stored)

    functions = (f"{HOSTILE}:length", f"{HOSTILE}:ids")
    [scored] = run(tmp_path, scenario, 1, functions)
    assert scored.group is stored[0]
    assert scored.components["length"].tolist() == [1, 2, 1]
    assert scored.components["ids"].tolist() == [0, 0, 0]


def test_a_process_that_dies_or_hangs_is_replaced(tmp_path):
    async def scenario(hosts, pool):
        scored = await pool.score([group(["1", "exit", "2", "loop", "3"])])
        return scored, pool.take_metrics()

    [scored], metrics = run(tmp_path, scenario, 1, timeout_s=0.5)
    assert [r for r in scored.rewards if not math.isnan(r)] == [1, 2, 3]
    assert metrics["reward/d.obey/died"] == metrics["reward/d.obey/timed_out"] == 1
    assert metrics["reward/pool/restarts"] == 2


def test_a_host_that_goes_costs_nothing(tmp_path):
    """It is killed while both work; what it had is scored by the other one."""

    async def scenario(hosts, pool):
        slow = group([f"slow {n}" for n in range(8)])
        scoring = asyncio.ensure_future(pool.score([slow]))
        await asyncio.sleep(0.5)
        await hosts[1].kill()
        [first] = await scoring
        [second] = await pool.score([group(["7"])])
        return first, second, pool.take_metrics()

    first, second, metrics = run(tmp_path, scenario, functions=(f"{HOSTILE}:slow",))
    assert first.rewards.tolist() == list(range(8)) and not math.isnan(second.rewards[0])
    assert metrics["reward/d.slow/died"] == 0


def test_the_last_host_that_goes_is_an_error(tmp_path):
    async def scenario(hosts, pool):
        for host in hosts:
            await host.kill()
        with pytest.raises(RewardError, match="a reward host has gone"):
            await pool.score([group(["1", "2", "3"])])
        with pytest.raises(RewardError, match="a reward host has gone"):
            await pool.score([group(["1"])])

    run(tmp_path, scenario, num_workers=2)


def test_who_lacks_the_token_gets_no_process(tmp_path):
    async def main():
        host = Host(tmp_path, 0)
        try:
            known = await host.start()
            guess = Endpoint(known.host, known.port, "guess")
            with pytest.raises(RewardError, match="it closes the connection"):
                async with RewardPool([domain(OBEY)], hosts=[guess]):
                    pass
        finally:
            await host.kill()

    asyncio.run(main())
    assert not (tmp_path / "rewards-0.log").exists()


def test_no_process_outlives_its_connection(tmp_path):
    async def scenario(hosts, pool):
        [scored] = await pool.score([group(["x"])])
        return int(scored.rewards[0])

    pid = run(tmp_path, scenario, 1, (PID,))
    deadline = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_program_publishes_where_it_listens(tmp_path, monkeypatch):
    served = []

    async def serve(*arguments):
        served.append(arguments)

    monkeypatch.setattr(reward_host, "serve", serve)
    reward_host.main(str(tmp_path), "3", 2)
    [(_, endpoint, log)] = served
    assert endpoint == tmp_path / "endpoints/3/reward-host-2.json"
    assert log == tmp_path / "logs/3/rewards-2.log"
