"""What a rollout server says of itself: whether it answers, and whether its processes run."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

from grpo_megatron import progress
from grpo_megatron.progress import read_progress
from grpo_megatron.rollout import server_progress
from grpo_megatron.rollout.server_progress import describe_stopped, is_healthy
from tests.rollout.fake_engine import fake_engines


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_health_is_an_answer_of_200():
    async def run():
        async with fake_engines() as [engine]:
            healthy = await asyncio.to_thread(is_healthy, *address(engine.url))
            engine.healthy = False
            ill = await asyncio.to_thread(is_healthy, *address(engine.url))
        gone = await asyncio.to_thread(is_healthy, *address(engine.url))
        return healthy, ill, gone

    assert asyncio.run(run()) == (True, False, False)


def test_answers_are_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(server_progress, "_LOOK_S", 0.05)
    monkeypatch.setattr(server_progress, "_START_LOOK_S", 0.05)
    monkeypatch.setattr(progress, "_SHORTEST_S", 0.05)
    monkeypatch.setattr(progress, "BEAT_S", 0.1)
    file = tmp_path / "rollout-0.json"

    async def run():
        async with fake_engines() as [engine]:
            engine.healthy = False
            server_progress.report(file, *address(engine.url))
            await until(lambda: (r := read_progress(file)) and r.phase == "starting")
            engine.healthy = True
            await until(lambda: read_progress(file).phase == progress.SERVING)
            engine.healthy = False
            await until(lambda: read_progress(file).idle_s > 1.0)
            engine.healthy = True
            await until(lambda: read_progress(file).idle_s < 1.0)

    try:
        asyncio.run(run())
    finally:
        progress._current.close()
        progress._current = None
    assert read_progress(file).role == "rollout-0"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_stopped_process_below_is_named(tmp_path):
    """A grandchild, started by another thread than the one that looks."""
    started = []

    def start():
        argv = [sys.executable, "-c", PARENT]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))

    threading.Thread(target=start).start()
    wait_until(lambda: started)
    grandchild = int(started[0].stdout.readline())
    try:
        assert describe_stopped() == ""
        os.kill(grandchild, signal.SIGSTOP)
        wait_until(lambda: describe_stopped() == f"sleep (pid {grandchild}) is stopped")
        os.kill(grandchild, signal.SIGCONT)
        wait_until(lambda: describe_stopped() == "")
    finally:
        os.kill(grandchild, signal.SIGKILL)
        started[0].wait()
        started[0].stdout.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
