"""A clock that is set, or differs between nodes, makes nothing look hung or late."""

from __future__ import annotations

import ast
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

import grpo_megatron
from grpo_megatron.launch.role_status import role_lines
from grpo_megatron.launch.watch import RoleWatch
from grpo_megatron.launch.watcher import Watcher
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.progress import BEAT_S, Progress, ProgressRecord
from grpo_megatron.rundir import RunDir

DAY_S = 86400.0


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    return run_dir


def jump(monkeypatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


def write(run_dir: RunDir, record: ProgressRecord) -> None:
    file = run_dir.role_progress(record.role)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(asdict(record)) + b"\n")


def never(seconds: float) -> None:
    raise AssertionError("nothing of this node needs to be looked at twice")


def working(run_dir: RunDir, role: str) -> ProgressRecord:
    progress = Progress(run_dir.role_progress(role), role)
    progress.enter("Train", "step_000003")
    return progress.record()


@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
def test_status_of_this_node_is_not_told_by_a_clock_that_is_set(run_dir, monkeypatch, seconds):
    write(run_dir, working(run_dir, "trainer-0"))
    jump(monkeypatch, seconds)
    [_, line] = role_lines(run_dir, never)
    *words, seconds = line.split()
    assert words == ["trainer-0", "works", "Train", "step_000003"]
    assert int(seconds) < DAY_S / 2


def test_status_of_this_node_tells_the_seconds_without_a_heartbeat(run_dir, monkeypatch):
    record = working(run_dir, "trainer-0")
    write(run_dir, replace(record, up_s=record.up_s - 100))
    jump(monkeypatch, -DAY_S)
    [_, line] = role_lines(run_dir, never)
    assert "no heartbeat for 10" in line and 100 <= int(line.split()[-1]) < 200


@pytest.mark.parametrize("ahead_s", [DAY_S, -DAY_S])
def test_a_node_with_another_clock_works_where_it_goes_on_beating(run_dir, ahead_s):
    record = working(run_dir, "trainer-0")
    record = replace(
        record, host="elsewhere", boot="another", written_at=time.time() + ahead_s, beat=7
    )
    write(run_dir, record)
    waited = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        write(run_dir, replace(record, beat=8))

    [_, line] = role_lines(run_dir, pause)
    assert line.split()[1] == "works" and line.split()[-1] == "0"
    assert waited and waited[0] > BEAT_S


def test_a_node_that_beats_no_more_is_late_by_its_clock(run_dir):
    record = working(run_dir, "trainer-0")
    record = replace(record, host="elsewhere", boot="another", written_at=time.time() - 300)
    write(run_dir, record)
    [_, line] = role_lines(run_dir, lambda seconds: None)
    assert "no heartbeat for 30" in line


def test_a_node_that_was_started_again_is_not_taken_for_the_one_before(run_dir):
    """The seconds since its start mean nothing then."""
    record = working(run_dir, "trainer-0")
    write(run_dir, replace(record, pid=os.getppid(), boot="before", written_at=time.time() - 300))
    [_, line] = role_lines(run_dir, lambda seconds: None)
    assert "no heartbeat for 30" in line


@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
def test_the_watch_names_nobody_for_a_clock(run_dir, monkeypatch, seconds):
    config = resolve("demo/gspo-moe-cpu", []).config
    watcher = Watcher(config, run_dir, {"trainer-0": os.getpid()}, lambda *_: None)
    progress = Progress(run_dir.role_progress("trainer-0"), "trainer-0")
    progress.enter("Train", "step_000003")
    for _ in range(20):
        jump(monkeypatch, seconds)
        progress.write()
        watcher.look_once(2.5)
    assert watcher.take_news() == []


def test_a_role_whose_clock_stands_still_is_named_by_its_heartbeats():
    """They count: a record with the same number is old, whatever time it says."""
    config = resolve("demo/gspo-moe-cpu", []).config
    watch = RoleWatch("trainer-0", config.watch, lambda phase: 600.0)
    record = ProgressRecord("trainer-0", 7, "here", 1, 0.0, "Train", "", False, 0.0)
    hangs = []
    for number in range(20):
        hangs.append(watch.update(replace(record, written_at=DAY_S * number), 2.5))
    assert hangs[-1] is not None and hangs[-1].cause == "silent"


WALL_CLOCK = {
    "launch/role_status.py",  # of other nodes, looked at twice
    "progress.py",
    "rollout/chat_protocol.py",  # a date in OpenAI's answers
    "telemetry/events.py",
    "telemetry/metrics.py",
}
"""Dates that people read; nothing is decided by them."""


def test_nothing_else_asks_for_the_time_of_day():
    root = Path(grpo_megatron.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.time":
                found.add(str(path.relative_to(root)))
    assert found == WALL_CLOCK
