"""Episodes on the servers of a run: how they are spread, and what a server that goes costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.environments import failures as failures_module
from grpo_megatron.environments import served as served_module
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Outcome, Reply, ToolCall, Unscorable
from grpo_megatron.environments.serve import serve
from grpo_megatron.errors import EpisodeError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.progress import SERVING, read_progress
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Problem
from tests.environments.test_host import HOSTILE, begun, domain, reason_of
from tests.environments.test_remote import health

PROBLEM = Problem("begin", "4")


@contextlib.asynccontextmanager
async def server(folder: Path, number: int, name: str = f"{HOSTILE}:Obedient"):
    """Server `number` of a run, in this process."""
    ready = asyncio.Event()
    serving = asyncio.create_task(
        serve(
            EnvironmentConfig(name=name),
            address="127.0.0.1",
            endpoint=folder / f"environment-{number}.json",
            log_path=Path(os.devnull),
            said=lambda _: ready.set(),
        )
    )
    try:
        await ready.wait()
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(served_module, "_AWAY_S", 0.05)


def test_the_calculator_is_the_same_on_a_server(tmp_path):
    replies = [Reply("", (ToolCall("calculate", {"expression": "2+2"}, "c"),)), Reply("4")]

    async def played(endpoints):
        host = EnvironmentHost([domain("d", "calculator", servers=1)], endpoints=endpoints)
        async with host:
            environment = host.environment("d")
            found = [await environment.reset(PROBLEM, 3)]
            for reply in replies:
                found.append(await environment.step(reply))
            await environment.close()
            return found, host.take_metrics(), len(host.processes)

    async def both():
        async with server(tmp_path, 0, "calculator"):
            return await played(tmp_path), await played(None)

    (apart, metrics, num_processes), (here, expected, _) = asyncio.run(both())
    assert repr(apart) == repr(here)
    assert metrics == expected and metrics["environment/d/episodes"] == 1
    assert num_processes == 0  # not even one to pass on what is said


def test_episodes_are_spread_over_the_servers_of_their_domain(tmp_path):
    """Servers are numbered over all domains, also beside one that has none."""
    domains = [domain("first", servers=1), domain("here"), domain("second", servers=2)]

    async def work():
        async with contextlib.AsyncExitStack() as stack:
            for number in range(3):
                await stack.enter_async_context(server(tmp_path, number))
            host = await stack.enter_async_context(EnvironmentHost(domains, endpoints=tmp_path))
            begun_here = [await begun(host, name="here")]
            episodes = [await begun(host, name="second") for _ in range(4)]
            counts = []
            for number in range(3):
                answer = await health(tmp_path / f"environment-{number}.json")
                counts.append(answer[1]["episodes"])
            for environment, _ in (*begun_here, *episodes):
                await environment.close()
            after = await health(tmp_path / "environment-2.json")
            return counts, after[1]["episodes"]

    counts, after = asyncio.run(work())
    assert counts == [0, 2, 2] and after == 0


def test_a_server_that_goes_costs_its_episodes_only(tmp_path, soon):
    async def work():
        async with server(tmp_path, 1), contextlib.AsyncExitStack() as first:
            await first.enter_async_context(server(tmp_path, 0))
            host = EnvironmentHost([domain(servers=2)], endpoints=tmp_path)
            episodes = [(await begun(host))[0] for _ in range(2)]
            await first.aclose()
            reason = await reason_of(episodes[0].step(Reply("go")))
            kept = await episodes[1].step(Reply("done 0.75"))
            later = [(await begun(host))[1] for _ in range(3)]
            for environment in episodes:
                await environment.close()
            return reason, kept, later, host.take_metrics()

    reason, kept, later, metrics = asyncio.run(work())
    assert "/step: " in reason and kept.outcome == Outcome(0.75, {"n": 1.0})
    assert len(later) == 3
    assert metrics["environment/obedient/lost"] == 1
    assert metrics["environment/obedient/spoilt"] == 0


def test_an_episode_waits_for_a_server_that_starts(tmp_path, soon):
    async def work():
        host = EnvironmentHost([domain(servers=1)], endpoints=tmp_path)
        beginning = asyncio.create_task(begun(host))
        await asyncio.sleep(0.2)
        assert not beginning.done()
        async with server(tmp_path, 0):
            _, observation = await beginning
        again = asyncio.create_task(begun(host))  # its address is still in the file
        await asyncio.sleep(0.2)
        assert not again.done()
        async with server(tmp_path, 0):
            await again
        return observation

    assert asyncio.run(work()).outcome == Outcome(0.25)


def test_servers_that_never_come_spoil_episodes_and_then_the_run(tmp_path, soon, monkeypatch):
    monkeypatch.setattr(served_module, "_WAIT_S", 0.2)
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 2)

    async def work():
        host = EnvironmentHost([domain(servers=1)], endpoints=tmp_path)
        reason = await reason_of(host.environment("obedient").reset(PROBLEM, 0))
        with pytest.raises(EpisodeError, match="spoilt 2 episodes without one that ended well"):
            await host.environment("obedient").reset(PROBLEM, 0)
        return reason

    assert "environment-0 has not said where it is" in asyncio.run(work())


def test_what_the_environment_does_itself_counts_as_in_a_process(tmp_path):
    async def work():
        async with server(tmp_path, 0):
            host = EnvironmentHost([domain(servers=1)], endpoints=tmp_path)
            limited, _ = await begun(host)
            await limited.step(Reply("go"))
            await limited.close()
            raised, _ = await begun(host)
            reason = await reason_of(raised.step(Reply("raise on purpose")))
            begins = await reason_of(
                host.environment("obedient").reset(Problem("unscorable no board", ""), 0)
            )
            return reason, begins, host.take_metrics()

    reason, begins, metrics = asyncio.run(work())
    assert reason == "it raised ValueError: on purpose" and begins == "no board"
    assert metrics["environment/obedient/spoilt"] == 2
    assert metrics["environment/obedient/episodes"] == 1


def test_the_role_serves_its_domain_until_it_is_ended(tmp_path):
    flags = ["domains.0.environment.servers=2", f"runs_dir={tmp_path}"]
    resolved = resolve("demo/agent-calculator-cpu", flags)
    run_dir = RunDir(resolved.run_path).begin()
    write_resolved(run_dir.config, resolved)
    module = "grpo_megatron.environments.server"
    command = [sys.executable, "-m", module, str(run_dir.root), run_dir.attempt, "1"]
    role = subprocess.Popen(command)
    endpoint = run_dir.endpoints / "environment-1.json"
    try:
        while not endpoint.exists():
            assert role.poll() is None
            time.sleep(0.05)
        assert stat.S_IMODE(endpoint.stat().st_mode) == 0o600
        status, answer = asyncio.run(health(endpoint))
        assert status == 200 and answer["environment"] == "calculator"
        progress = run_dir.role_progress("environment-1")
        while (record := read_progress(progress)) is None or record.phase != SERVING:
            time.sleep(0.05)
        assert record.detail.startswith("products: calculator at http://127.0.0.1:")
    finally:
        role.send_signal(signal.SIGTERM)
        assert role.wait(30) == -signal.SIGTERM


def test_an_unreachable_server_is_unscorable_and_closing_it_says_nothing(tmp_path):
    async def work():
        async with server(tmp_path, 0):
            host = EnvironmentHost([domain(servers=1)], endpoints=tmp_path)
            environment, _ = await begun(host)
        with pytest.raises(Unscorable):
            await environment.step(Reply("go"))
        await environment.close()
        await environment.close()

    asyncio.run(work())
