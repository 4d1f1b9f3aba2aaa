"""Environments in processes: what comes through, and what one that fails costs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.environments import failures as failures_module
from grpo_megatron.environments import host as host_module
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Outcome, Reply, Step, ToolCall, Unscorable
from grpo_megatron.errors import EpisodeError
from grpo_megatron.types import Problem
from tests.environments.test_tools import play

HOSTILE = "tests.environments.hostile"


def domain(name="obedient", environment=f"{HOSTILE}:Obedient", **settings):
    return DomainConfig.model_validate(
        {
            "name": name,
            "source": "file",
            "path": "rows.jsonl",
            "template": "chat",
            "rewards": [{"function": "environment"}],
            "environment": {"name": environment, **settings},
        }
    )


def hosted(work, *domains, **options):
    """The result of `work(host)` in a host of these domains."""

    async def run():
        async with EnvironmentHost(domains or [domain()], **options) as host:
            return await work(host)

    return asyncio.run(run())


async def begun(host, question="begin", seed=0, name="obedient", **metadata):
    environment = host.environment(name)
    observation = await environment.reset(Problem(question, "", metadata), seed)
    return environment, observation


async def reason_of(asked):
    """Why an episode cannot be scored."""
    with pytest.raises(Unscorable) as caught:
        await asked
    return caught.value.reason


def test_an_episode_comes_through_as_it_is():
    async def work(host):
        environment, observation = await begun(host, "begin ö", 7)
        steps = [await environment.step(Reply(text)) for text in ("go", "nan", "done 0.75")]
        await environment.close()
        return observation, steps, host.take_metrics()

    observation, (first, second, last), metrics = hosted(work)
    assert observation.messages == ({"role": "user", "content": "Go on. begin ö 7"},)
    assert observation.state == "begin ö 7" and observation.outcome == Outcome(0.25)
    assert first.messages[0]["content"] == "go" and math.isnan(first.reward)
    assert first.outcome is None
    assert math.isnan(second.reward) and math.isnan(second.outcome.reward)
    assert math.isnan(second.outcome.metrics["seen"]) and second.outcome.metrics["moves"] == 2
    assert last == Step((), 0.5, True, "end", False, Outcome(0.75, {"n": 1.0}))
    assert metrics == {
        "environment/obedient/episodes": 1,
        "environment/obedient/spoilt": 0,
        "environment/obedient/lost": 0,
        "environment/obedient/ends": 0,
    }


@pytest.mark.parametrize("name", ["calculator", "lights_out", "guess_number"])
def test_shipped_environments_play_the_same_in_a_process(name):
    from grpo_megatron.environments.registry import bind

    problem = Problem("How much?", "4", {"messages": [{"role": "user", "content": "How much?"}]})
    replies = [
        Reply("press 1 2", (ToolCall("calculate", {"expression": "2+2"}, "c"),)),
        Reply("press 2 2 4"),
    ]

    async def work(host):
        environment = host.environment("d")
        found = [await environment.reset(problem, 3)]
        for reply in replies:
            found.append(await environment.step(reply))
        await environment.close()
        return found

    apart = hosted(work, domain("d", name))
    assert repr(apart) == repr(play(bind(name, {}).make(), *replies, problem=problem, seed=3))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise on purpose", "it raised ValueError: on purpose"),
        ("unscorable the server is away", "the server is away"),
        ("sys.exit", "it raised SystemExit"),
        ("sleep", "it took longer than 0.5 s (step_s)"),
        ("stubborn", "it took longer than 0.5 s (step_s)"),
        ("memory", "it raised MemoryError"),
        ("files", "it raised OSError"),
        ("surrogate", "its reply is no JSON"),
        ("object", "its reply is no JSON"),
        ("endless", "its reply is no JSON"),
        ("huge_state", "its reply has 10.0 MiB"),
        ("nothing", "step returned no message"),
        ("cancelled", "it raised CancelledError"),
        ("await_cancelled", "it raised CancelledError"),
        ("cancel_itself", "it raised CancelledError"),
        ("own_end", "it raised OwnEnd"),
        ("group", "it raised BaseExceptionGroup"),
        ("without_text", "it raised WithoutText, whose text cannot be had"),
        ("text_of_none", "it raised TextOfNone, whose text cannot be had"),
        ("without_reason", "it raised WithoutReason, whose text cannot be had"),
        ("404", "404"),
        ("none", "None"),
    ],
)
def test_a_step_that_fails_costs_its_episode_only(text, reason):
    async def work(host):
        other, _ = await begun(host, "other")
        environment, _ = await begun(host)
        found = await reason_of(environment.step(Reply(text)))
        await environment.close()
        assert (await other.step(Reply("still here"))).messages[0]["content"] == "still here"
        return found, host.take_metrics()

    step_s = 60.0
    if text in ("sleep", "stubborn"):
        step_s = 0.5
    found, metrics = hosted(work, domain(step_s=step_s))
    assert reason in found
    assert metrics["environment/obedient/spoilt"] == 1
    assert metrics["environment/obedient/ends"] == 0


def test_a_reply_that_memory_cannot_encode_costs_its_episode_only():
    async def work(host):
        other, _ = await begun(host, "other")
        environment, _ = await begun(host)
        found = await reason_of(environment.step(Reply("vast")))
        assert (await other.step(Reply("still here"))).messages[0]["content"] == "still here"
        return found, host.take_metrics()

    found, metrics = hosted(work, domain(memory_mib=512))
    assert found == "its reply has 256.0 MiB, and may have 8"
    assert metrics["environment/obedient/spoilt"] == 1
    assert metrics["environment/obedient/ends"] == 0


def test_one_that_raises_in_reset():
    async def work(host):
        environment = host.environment("obedient")
        found = await reason_of(environment.reset(Problem("raise at once", ""), 0))
        await environment.close()
        _, observation = await begun(host)
        return found, observation

    found, observation = hosted(work)
    assert found == "it raised ValueError: at once"
    assert observation.messages


def test_why_an_episode_cannot_be_scored_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(failures_module, "_MOST_LOGGED", 2)

    async def work(host):
        for question in ("raise one", "raise two", "raise three"):
            with contextlib.suppress(Unscorable):
                await begun(host, question)

    hosted(work)
    words = "of domain obedient: an episode cannot be scored: it raised ValueError: "
    assert f"{words}one" in caplog.text
    assert "ValueError: two" in caplog.text
    assert "further ones are only counted" in caplog.text
    assert "three" not in caplog.text


def test_spoilt_is_counted():
    async def work(host):
        environment, _ = await begun(host)
        step = await environment.step(Reply("spoilt"))
        return step.spoilt, host.take_metrics()["environment/obedient/spoilt"]

    assert hosted(work) == (True, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exit", "its process ended (exit code 3)"),
        ("garbage", "its process wrote what is no answer"),
        ("strange", "its process wrote what is no answer"),
        ("bytes", "its process wrote what is no answer"),
        ("flood", "its process wrote what is no answer"),
        ("block", "its process has not answered for 2.5 s"),
        ("loop", "out of CPU time: a step computed for longer than step_s|has not answered"),
    ],
)
def test_a_process_that_fails_is_replaced(text, reason):
    async def work(host):
        [process] = host.processes
        first = process.pid
        other, _ = await begun(host, "other")
        waiting = asyncio.create_task(reason_of(other.step(Reply("nap 50"))))
        idle, _ = await begun(host, "idle")
        environment, _ = await begun(host)
        reasons = [await reason_of(environment.step(Reply(text))), await waiting]
        reasons.append(await reason_of(idle.step(Reply("go"))))
        for ended in (environment, other, idle):
            await ended.close()
        assert not psutil.pid_exists(first)
        again, _ = await begun(host, "again")
        step = await again.step(Reply("works"))
        return reasons, step, host.take_metrics()

    step_s = 60.0
    if text in ("block", "loop"):
        step_s = 0.5
    reasons, step, metrics = hosted(work, domain(step_s=step_s))
    assert reasons[1] == reasons[0]
    assert any(words in reasons[0] for words in reason.split("|")), reasons
    assert reasons[2] == "its process has ended"
    assert step.messages[0]["content"] == "works"
    assert metrics["environment/obedient/ends"] == 1
    assert metrics["environment/obedient/lost"] >= 2


def test_what_is_printed_goes_to_the_log(tmp_path):
    async def work(host):
        environment, _ = await begun(host)
        return await environment.step(Reply("print it"))

    log = tmp_path / "log"
    assert hosted(work, log_path=log).messages[0]["content"] == "print it"
    assert b"printed" in log.read_bytes() and b"\xff\xfe raw" in log.read_bytes()


def test_one_that_prints_without_end_fills_no_disk(tmp_path, caplog):
    """Through what it has started; domains beside it, which print into the same log, go on."""
    log = tmp_path / "log"
    log.write_text("of the start\n")

    async def work(host):
        beside, _ = await begun(host, name="beside")
        waiting = asyncio.create_task(beside.step(Reply("print beside")))
        environment, _ = await begun(host)
        found = await reason_of(environment.step(Reply("pour")))
        await environment.close()
        await waiting
        assert (await beside.step(Reply("go"))).messages[0]["content"] == "go"
        again, _ = await begun(host, "again")
        assert (await again.step(Reply("works"))).messages[0]["content"] == "works"
        return found, host.take_metrics()

    found, metrics = hosted(work, domain(step_s=600), domain("beside"), log_path=log)
    assert found.startswith("its process printed more than it may: 64 MiB at once")
    assert metrics["environment/obedient/ends"] == metrics["environment/obedient/lost"] == 1
    assert metrics["environment/beside/ends"] == metrics["environment/beside/lost"] == 0
    assert log.stat().st_size < 1 << 22
    told = log.read_text(errors="replace")
    subject = f"environment {HOSTILE}:Obedient of domain obedient"
    assert told.startswith("of the start") and f"{subject} printed without end" in told
    assert f"{subject}: {found}" in caplog.text


def test_a_log_that_cannot_be_opened_leaves_no_process(tmp_path):
    """Which would count as one that has begun."""
    log = tmp_path / "logs" / "log"
    [process] = EnvironmentHost([domain()], log_path=log).processes

    async def run():
        with pytest.raises(FileNotFoundError):
            await process.start()
        assert process.pid is None
        log.parent.mkdir()
        assert await process.start() == 1
        await process.close()

    asyncio.run(run())


def test_one_that_prints_without_end_while_it_is_imported(tmp_path, monkeypatch):
    host = EnvironmentHost([domain()], log_path=tmp_path / "log")
    (tmp_path / "log").touch()
    [process] = host.processes
    begin = host_module.Begin("tests.environments.pouring:X", {}, 1.0, 100, 1 << 31, False)
    monkeypatch.setattr(process, "_begin", begin)

    async def run():
        async with host:
            pass

    with pytest.raises(EpisodeError, match=r"does not begin: its process printed more"):
        asyncio.run(run())


def test_a_long_message_is_cut():
    async def work(host):
        environment, _ = await begun(host)
        return await environment.step(Reply("long"))

    content = hosted(work, domain(observation_characters=1000)).messages[0]["content"]
    assert len(content) < 1100 and "10484760 characters left out" in content


def test_a_long_question_of_the_recipe_is_not_cut():
    asked = {"role": "user", "content": "2 + 2? " * 50 + "\x0c"}

    async def work(host):
        environment = host.environment("calculator")
        return await environment.reset(Problem("?", "4", {"messages": [asked]}), 1)

    settings = domain("calculator", "calculator", observation_characters=100)
    assert hosted(work, settings).messages == (asked,)


@pytest.mark.parametrize(
    "close", ["raise x", "cancelled", "await_cancelled", "own_end", "without_text", "404"]
)
def test_an_end_that_fails_keeps_nobody(close):
    async def work(host):
        environment, _ = await begun(host, close=close)
        await environment.step(Reply("done 1"))
        async with asyncio.timeout(30):
            await environment.close()
        return host.take_metrics()

    metrics = hosted(work)
    assert metrics["environment/obedient/episodes"] == 1
    assert metrics["environment/obedient/ends"] == 0


def test_an_end_that_never_comes_keeps_nobody():
    async def work(host):
        environment, _ = await begun(host, close="sleep")
        stubborn, _ = await begun(host, close="stubborn")
        await asyncio.gather(environment.close(), stubborn.close())
        _, observation = await begun(host, "other")
        return observation

    assert hosted(work, domain(step_s=0.5)).messages


def test_an_episode_can_be_ended_in_the_middle_of_a_step():
    async def work(host):
        environment, _ = await begun(host)
        asked = asyncio.create_task(environment.step(Reply("sleep")))
        await asyncio.sleep(0.1)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        await environment.close()
        other, _ = await begun(host, "other")
        return await other.step(Reply("here"))

    assert hosted(work).messages[0]["content"] == "here"


def test_a_step_whose_episode_is_ended_is_answered():
    async def work(host):
        environment, _ = await begun(host)
        await environment.step(Reply("go"))
        asked = asyncio.create_task(environment.step(Reply("sleep")))
        await asyncio.sleep(0.1)
        await environment.close()
        async with asyncio.timeout(30):
            return await reason_of(asked), host.take_metrics()

    found, metrics = hosted(work)
    assert found == "its episode was ended"
    assert metrics["environment/obedient/episodes"] == 1
    assert metrics["environment/obedient/spoilt"] == 0


@pytest.mark.parametrize(("kind", "connects"), [("Obedient", False), ("Networked", True)])
def test_only_environments_that_ask_for_it_have_the_network(kind, connects):
    async def work(host):
        with socket.create_server(("127.0.0.1", 0)) as server:
            environment, _ = await begun(host)
            asked = environment.step(Reply(f"connect {server.getsockname()[1]}"))
            if connects:
                return (await asked).messages[0]["content"]
            return await reason_of(asked)

    found = hosted(work, domain(environment=f"{HOSTILE}:{kind}"))
    if connects:
        assert found == "connected"
    else:
        assert found.startswith("it raised PermissionError")


def test_two_thousand_waiting_episodes_cost_no_thread_each():
    number = 2000

    async def work(host):
        [process] = host.processes
        environments = [host.environment("obedient") for _ in range(number)]
        problem = Problem("begin", "", {"padding": "x" * 1000})
        await asyncio.gather(*(one.reset(problem, seed) for seed, one in enumerate(environments)))
        asked = [asyncio.create_task(one.step(Reply("sleep"))) for one in environments[:-1]]
        first = await environments[-1].step(Reply("pid"))
        of_process = psutil.Process(process.pid)
        found = (
            first.messages[0]["content"] == str(process.pid),
            of_process.num_threads(),
            len(of_process.children(recursive=True)),
            of_process.memory_info().rss,
            sum(not task.done() for task in asked),
        )
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in environments))
        return found

    answered, threads, children, resident, waiting = hosted(work, domain(step_s=500))
    assert answered and waiting == number - 1
    assert threads <= 4 and children == 0
    assert resident < 1 << 30


def test_episodes_are_spread_over_processes():
    async def work(host):
        pids = set()
        for seed in range(4):
            environment, _ = await begun(host, seed=seed)
            pids.add((await environment.step(Reply("pid"))).messages[0]["content"])
        return pids

    assert len(hosted(work, domain(processes=2))) == 2


def test_episodes_that_wait_for_a_new_process_are_counted_once():
    async def work(host):
        [first, _] = host.processes
        environment, _ = await begun(host)
        await reason_of(environment.step(Reply("exit")))
        await environment.close()
        assert first.pid is None
        together = await asyncio.gather(*(begun(host, seed=seed) for seed in range(8)))
        loads = [[process.load for process in host.processes]]
        await asyncio.gather(*(environment.close() for environment, _ in together))
        loads.append([process.load for process in host.processes])
        return loads

    assert hosted(work, domain(processes=2)) == [[4, 4], [0, 0]]


def test_one_that_costs_process_after_process_stops_the_run(monkeypatch):
    monkeypatch.setattr(failures_module, "MAX_ENDS", 2)

    async def work(host):
        while True:
            environment, _ = await begun(host)
            with contextlib.suppress(Unscorable):
                await environment.step(Reply("exit"))

    with pytest.raises(EpisodeError, match="cost 2 processes") as caught:
        hosted(work)
    assert "[[domains]] obedient" in caught.value.where


def test_one_that_spoils_every_episode_stops_the_run(monkeypatch):
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 3)

    async def work(host):
        works, _ = await begun(host)
        for _ in range(2):
            with contextlib.suppress(Unscorable):
                await begun(host, "raise x")
        await works.step(Reply("done 1"))
        for _ in range(4):
            with contextlib.suppress(Unscorable):
                await begun(host, "raise y")
        raise AssertionError("it went on")

    with pytest.raises(EpisodeError, match=r"spoilt 3 episodes .* ValueError: y"):
        hosted(work)


def test_an_episode_that_a_limit_ends_has_ended_well(monkeypatch):
    monkeypatch.setattr(failures_module, "MAX_SPOILT", 3)

    async def work(host):
        for question in ["begin", "raise x"] * 5:
            with contextlib.suppress(Unscorable):
                environment, _ = await begun(host, question)
                await environment.step(Reply("go"))
                await environment.step(Reply("on"))
                await environment.close()
        # none of these has ended well: no turn, one that fails, one that is spoilt
        idle, _ = await begun(host)
        await idle.close()
        for turn in ("raise y", "spoilt"):
            environment, _ = await begun(host)
            await environment.step(Reply("go"))
            with contextlib.suppress(Unscorable):
                await environment.step(Reply(turn))
            await environment.close()
            await environment.close()
        return host.take_metrics()

    metrics = hosted(work)
    assert metrics["environment/obedient/episodes"] == 5
    assert metrics["environment/obedient/spoilt"] == 7


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"environment": "calculater"}, "did you mean 'calculator'"),
        ({"arguments": {"x": 1}}, "cannot be made"),
    ],
)
def test_a_host_begins_with_environments_that_can_be_made(table, words):
    with pytest.raises(EpisodeError, match=words) as caught:
        EnvironmentHost([domain(**table)])
    assert caught.value.where == "[[domains]] obedient, environment"


def test_a_process_that_cannot_begin_says_why(monkeypatch):
    host = EnvironmentHost([domain()])
    [process] = host.processes
    monkeypatch.setattr(
        process, "_begin", host_module.Begin("not_here:X", {}, 1.0, 100, 1 << 31, False)
    )

    async def run():
        async with host:
            pass

    with pytest.raises(EpisodeError, match="does not begin: no module 'not_here'"):
        asyncio.run(run())


def test_a_domain_without_an_environment_is_named():
    async def work(host):
        return host.environment("obediant")

    with pytest.raises(KeyError, match="did you mean 'obedient'"):
        hosted(work)


PARENT = """
import asyncio, sys
from tests.environments.test_host import begun, domain
from grpo_megatron.environments.host import EnvironmentHost

async def main():
    async with EnvironmentHost([domain(step_s=500)]) as host:
        environment, _ = await begun(host)
        print(host.processes[0].pid, flush=True)
        from grpo_megatron.environments.protocol import Reply
        await environment.step(Reply("block"))

asyncio.run(main())
"""


def test_processes_end_with_their_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
