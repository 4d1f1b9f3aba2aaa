"""Hostile programs end, are refused for the right reason, and harm nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

from grpo_megatron.rewards import sandbox, seccomp
from grpo_megatron.rewards.sandbox import MIB, Limits, ProgramOutcome
from tests.rewards import programs
from tests.rewards.sandboxes import (
    hostile_program,
    needs_sandbox,
    wait_until_none_is_left,
    world_outside,
)

PATIENT = Limits(wall_s=60.0, memory_bytes=256 * MIB, tmp_bytes=4 * MIB + os.getpid())
HASTY = Limits(wall_s=1.0, memory_bytes=256 * MIB, tmp_bytes=4 * MIB + os.getpid())


def run_program(source: str, stdin: str = "", *, limits: Limits) -> ProgramOutcome:
    return asyncio.run(sandbox.run({"/program.py": source}, stdin, limits=limits))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """What no program may reach, by the word that stands for it; looked at again in the end."""
    monkeypatch.setenv("REWARD_SECRET", "secret")
    with world_outside(tmp_path) as words:
        yield words
    wait_until_none_is_left(PATIENT.tmp_bytes)


def run_hostile(source, limits, outside):
    return run_program(hostile_program(source, outside), "the input", limits=limits)


@needs_sandbox
@pytest.mark.parametrize("name", programs.REFUSED)
def test_attacks_are_refused(outside, name):
    outcome = run_hostile(programs.REFUSED[name], PATIENT, outside)
    assert outcome.ending == "exited", outcome
    assert b"REFUSED" in outcome.stdout and b"ESCAPED" not in outcome.stdout, outcome
    assert b"NameError" not in outcome.stdout, outcome


@needs_sandbox
@pytest.mark.parametrize("name", programs.ENDLESS)
def test_endless_programs_are_ended(outside, name):
    assert run_hostile(programs.ENDLESS[name], HASTY, outside).ending == "timed_out"


@needs_sandbox
@pytest.mark.parametrize("name", programs.FLOODS)
def test_floods_are_cut(outside, name):
    outcome = run_hostile(programs.FLOODS[name], PATIENT, outside)
    assert outcome.ending == "flooded"
    assert max(len(outcome.stdout), len(outcome.stderr)) == PATIENT.output_bytes


@needs_sandbox
@pytest.mark.parametrize("name", programs.EXITS)
def test_exit_codes_are_the_programs_own(outside, name):
    code, source = programs.EXITS[name]
    outcome = run_hostile(source, PATIENT, outside)
    assert (outcome.ending, outcome.exit_code) == ("exited", code), outcome


@needs_sandbox
def test_processor_time_is_limited():
    source = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU)[1])"
    assert run_program(source, limits=Limits(wall_s=20.5)).stdout == b"22\n"


@needs_sandbox
def test_a_program_sees_who_and_where_it_is():
    source = (
        "import os, socket, sys\nprint(os.getuid(), os.getgid(), socket.gethostname(), "
        "sorted(os.environ), os.getcwd(), sorted(os.listdir('/')))"
    )
    told = run_program(source, limits=PATIENT).stdout.decode()
    top = Path(os.path.realpath(sys.base_prefix)).parts[1]
    for path in {"usr", "tmp", "program.py", top}:
        assert f"'{path}'" in told
    assert told.startswith("65534 65534 sandbox ['LANG', ") and "/tmp [" in told
    for path in {"home", "proc", "etc", "var", "srv", "sys", "run"} - {top, "etc"}:
        assert f"'{path}'" not in told


@needs_sandbox
@pytest.mark.parametrize("hash_seed", [None, 0, 7])
def test_python_takes_nothing_from_outside(hash_seed, monkeypatch):
    """Neither variables of its own, nor modules beside the program or of a user."""
    monkeypatch.setenv("PYTHONPATH", "/tmp")
    monkeypatch.setenv("PYTHONSTARTUP", "/tmp/start.py")
    source = (
        "import os, sys\nflags = sys.flags\n"
        "print(flags.safe_path, flags.no_user_site, flags.dont_write_bytecode)\n"
        "print([path for path in sys.path if path in ('', '/', '/tmp')])\n"
        "print([name for name in sorted(os.environ) if name.startswith('PYTHON')])"
    )
    given = []
    if hash_seed is not None:
        given = ["PYTHONHASHSEED"]
    outcome = asyncio.run(sandbox.run({"/program.py": source}, limits=PATIENT, hash_seed=hash_seed))
    assert outcome.stdout.decode() == f"True 1 1\n[]\n{given}\n", outcome


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere", "bwrap is not installed"),
        ("fake", "No permissions to create new namespace"),
    ],
)
def test_it_says_why_there_is_no_isolation(path, words, tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if path == "fake" else path)
    sandbox.why_not.cache_clear()
    try:
        assert words in sandbox.why_not()
    finally:
        sandbox.why_not.cache_clear()


@needs_sandbox
def test_a_run_looks_from_within_its_event_loop():
    async def look():
        return sandbox.why_not()

    sandbox.why_not.cache_clear()
    assert asyncio.run(look()) is None


@pytest.mark.parametrize(
    ("target", "value"), [("sys.platform", "darwin"), ("platform.machine", lambda: "mips")]
)
def test_other_machines_are_refused(target, value, monkeypatch):
    monkeypatch.setattr(target, value)
    sandbox.why_not.cache_clear()
    try:
        assert "only on Linux on x86_64 and aarch64" in sandbox.why_not()
    finally:
        sandbox.why_not.cache_clear()


@needs_sandbox
def test_a_sandbox_that_fails_is_no_programs_fault(monkeypatch):
    monkeypatch.setattr(seccomp, "program", lambda: b"no filter")
    outcome = run_program("print(1)", limits=PATIENT)
    assert outcome.ending == "failed" and outcome.stderr


def test_a_sandbox_that_dies_and_leaves_a_child_does_not_block(tmp_path, monkeypatch):
    """bubblewrap did, when it failed early: its child kept our pipes open."""
    fake, left = tmp_path / "bwrap", tmp_path / "left"
    fake.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {left}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    outcome = run_program("print(1)", limits=HASTY)
    assert outcome.ending == "timed_out"
    ended = (psutil.NoSuchProcess, psutil.ZombieProcess)
    with contextlib.suppress(*ended):
        psutil.Process(int(left.read_text())).wait(10)


@needs_sandbox
def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_program("print(1)", limits=PATIENT)
    assert len(os.listdir("/proc/self/fd")) <= before
