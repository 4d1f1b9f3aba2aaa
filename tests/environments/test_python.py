"""Python for the policy: names that live on, and programs that are nobody's friends."""

from __future__ import annotations

import asyncio
import math
import subprocess

import pytest

from grpo_megatron.environments import python
from grpo_megatron.environments.protocol import Reply, ToolCall, Unscorable
from grpo_megatron.environments.python import PythonInterpreter, refuse_long_programs
from grpo_megatron.environments.registry import bind
from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards import sandbox
from grpo_megatron.types import Problem
from tests.environments.test_host import domain, hosted
from tests.environments.test_tools import play
from tests.rewards import programs
from tests.rewards.sandboxes import hostile_program, needs_sandbox, world_outside

pytestmark = needs_sandbox
PROBLEM = Problem("What is 6 * 7?", "42")
PATIENT = {"timeout_s": 60.0, "memory_mib": 256}


def cell(source):
    return Reply("", (ToolCall("run_python", {"code": source}),))


def results(*sources, seed=0, **arguments):
    """What the cells of one episode print."""
    environment = PythonInterpreter(**{**PATIENT, **arguments})
    steps = play(environment, *map(cell, sources), problem=PROBLEM, seed=seed)[1:]
    return [step.messages[0]["content"] for step in steps]


def test_names_live_on_and_earlier_cells_are_silent():
    assert results(
        "import math\nx = 6\nprint('once')",
        "def times(y):\n    return x * y",
        "times(7)",
        "x += 1; print(x, end='')",
        "x\nx + 1",
    ) == ["once\n", "(no output)", "42\n", "7", "8\n"]


def states(*sources):
    """The names of the states behind the cells of one episode."""
    steps = play(PythonInterpreter(**PATIENT), *map(cell, sources), problem=PROBLEM)[1:]
    return [step.state for step in steps]


def test_states_are_equal_where_the_cells_were():
    told = [states(source) for source in ("x = 1", "x = 2", "y = 3")]
    assert told[0] == states("x = 1")
    assert len({state for [state] in told}) == 3


def test_states_are_named_by_cells_and_not_by_what_they_print():
    """Which may be the time, or an address where the kernel gives others each time."""
    clock = "import time\nprint(time.time_ns())"
    assert states(clock, "x = 1") == states(clock, "x = 1")


def keeps_addresses():
    """Whether the kernel, or the profile of a container, lets programs keep their addresses."""
    asked = subprocess.run(["setarch", "--addr-no-randomize", "true"], capture_output=True)
    return asked.returncode == 0


@pytest.mark.skipif(not keeps_addresses(), reason="addresses cannot be kept here")
def test_addresses_are_those_of_the_seed():
    cells = ["class A: pass\nA()", "[object(), lambda x: x]", "{object(): 1, A: 2}"]
    assert results(*cells, seed=3) == results(*cells, seed=3)


@pytest.mark.parametrize(
    ("first", "second", "printed"),
    [
        (
            "import logging\nlogging.basicConfig(level=logging.INFO, format='%(message)s')\n"
            "logging.info('one')",
            "logging.info('two')",
            ["one\n", "two\n"],
        ),
        (
            "import sys\ndef say(x, file=sys.stdout):\n    print(x, file=file)\nsay(1)",
            "say(2)",
            ["1\n", "2\n"],
        ),
        (
            "from sys import stderr\nprint('a', file=stderr)",
            "print('b', file=stderr)",
            ["a\n", "b\n"],
        ),
        (
            "import sys\nbuffer = sys.stdout.buffer\nx = buffer.write(b'a')",
            "y = buffer.write(b'b')",
            ["a", "b"],
        ),
        (
            "import io, sys\nsys.stdout = io.StringIO()\nprint('lost')",
            "print(1)\nsys.stdout = io.StringIO()\nsys.stdout = sys.__stdout__\nprint(2)",
            ["(no output)", "1\n2\n"],
        ),
    ],
)
def test_cells_print_through_what_earlier_ones_have_kept(first, second, printed):
    assert results(first, second) == printed


def test_a_cell_that_was_undone_is_in_no_state():
    ends = "import os\nos._exit(3)"
    assert states("x = 1", ends) == states("x = 1", f"x = 2\n{ends}")


def test_what_a_cell_raises_is_shown_and_its_names_stay():
    first, second, third = results("x = 1\nraise ValueError('no')\nx = 2", "x", "x +")
    assert first.startswith("Traceback") and first.endswith("ValueError: no\n")
    assert "inside.py" not in first
    assert second == "1\n"
    assert "SyntaxError" in third


def test_an_exit_ends_the_cell_only():
    assert results("x = 1\nraise SystemExit\nx = 2", "x") == ["(no output)", "1\n"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 2\nimport os\nos._exit(3)", "ended with exit code 3; the cell was undone"),
        ("x = 2\nprint('soon', flush=True)\nwhile True: pass", "ran for longer than 2 s"),
        ("x = 2\nwhile True: print('x' * 4096)", "printed more than 1048576 bytes"),
    ],
)
def test_a_cell_that_does_not_end_is_undone(source, words):
    _, told, left = results("x = 1", source, "x", timeout_s=2.0)
    assert words in told
    assert left == "1\n"


def test_random_numbers_are_those_of_the_seed():
    source = "import random\nrandom.random()"
    first = results(source, source, seed=1)
    assert first == results(source, source, seed=1)
    assert first != results(source, source, seed=2)
    assert first[0] != first[1]


def test_hashes_live_on_as_names_do():
    """Each call runs the cells again, in a process of its own."""
    cells = ["h = hash('a')\nprint(set('abcdef'))", "h == hash('a')", "print(set('abcdef'))"]
    first, same, last = results(*cells, seed=-3)
    assert same == "True\n"
    assert first == last
    assert len({results("hash('a')", seed=seed)[0] for seed in range(4)}) == 4


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("for i in range(3): i", "(no output)"),
        ("def f(): return 5\nif True: f()", "(no output)"),
        ("with open('f', 'w') as f: f.write('x')", "(no output)"),
        ("x = 5\nx;", "5\n"),
        ("for i in range(3): i\ni", "2\n"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
    ],
)
def test_only_an_expression_that_ends_a_cell_is_shown(source, shown):
    assert results(source) == [shown]


def test_the_answer_is_scored():
    last = play(PythonInterpreter(), cell("6 * 7"), Reply("It is 42."), problem=PROBLEM)[-1]
    assert last.done and last.outcome.reward == 1 and last.outcome.metrics["tool_calls"] == 1


def test_no_program_escapes(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_SECRET", "secret")

    async def told_by(source):
        environment = PythonInterpreter(**PATIENT)
        await environment.reset(PROBLEM, 0)
        return (await environment.step(cell(source))).messages[0]["content"]

    async def all_of_them(words):
        sources = [hostile_program(source, words) for source in programs.REFUSED.values()]
        return await asyncio.gather(*map(told_by, sources))

    with world_outside(tmp_path) as words:
        of_programs = asyncio.run(all_of_them(words))
    for name, told in zip(programs.REFUSED, of_programs, strict=True):
        assert "REFUSED" in told and "ESCAPED" not in told, f"{name}: {told}"
        assert "NameError" not in told, f"{name}: {told}"


@pytest.mark.parametrize("name", ["loop", "sleep", "signals ignored", "output closed"])
def test_endless_programs_are_ended(name):
    [told] = results(programs.PRELUDE + programs.ENDLESS[name], timeout_s=1.5)
    assert "ran for longer than 1.5 s" in told


def test_programs_run_in_a_process_of_environments():
    async def work(host):
        environment = host.environment("d")
        await environment.reset(PROBLEM, 0)
        steps = [await environment.step(cell(source)) for source in ("x = 6", "x * 7")]
        return [step.messages[0]["content"] for step in steps]

    assert hosted(work, domain("d", "python", arguments=PATIENT)) == ["(no output)", "42\n"]


def test_a_sandbox_that_fails_is_nobodys_fault(monkeypatch):
    async def run(*_, **__):
        return sandbox.ProgramOutcome(stderr=bytearray(b"no permission"))

    monkeypatch.setattr(python.sandbox, "run", run)
    with pytest.raises(Unscorable, match="the sandbox failed: no permission"):
        play(PythonInterpreter(), cell("1"), problem=PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"timeout_s": math.nan}, "timeout_s = nan"),
        ({"timeout_s": math.inf}, "timeout_s = inf"),
        ({"memory_mib": "512"}, "memory_mib = '512'"),
        ({"memory_mib": 31}, "memory_mib = 31"),
        ({"memory_mib": 64.5}, "memory_mib = 64.5"),
    ],
)
def test_wrong_limits_are_refused(arguments, words):
    with pytest.raises(EpisodeError, match=words):
        bind("python", arguments)


def test_programs_run_in_the_least_memory_that_is_taken():
    arguments = {**PATIENT, "memory_mib": 32}
    assert bind("python", arguments)
    source = "import collections, fractions, itertools, math, random, re, statistics\n1"
    assert results(source, **arguments) == ["1\n"]


@pytest.mark.parametrize(
    ("arguments", "step_s", "words"),
    [
        ({}, 4.5, None),
        ({}, 4.0, r"timeout_s = 4 is not below step_s \(4 s\)"),
        ({"timeout_s": 6}, 3.0, r"timeout_s = 6 is not below step_s \(3 s\)"),
    ],
)
def test_a_program_ends_before_its_step_does(arguments, step_s, words):
    bound = bind("python", arguments)
    if words is None:
        refuse_long_programs(bound, step_s)
        return
    with pytest.raises(EpisodeError, match=words) as caught:
        refuse_long_programs(bound, step_s)
    assert "step_s to" in caught.value.remedy


def test_time_limits_of_other_environments_are_their_own():
    refuse_long_programs(bind("remote", {"url": "http://x", "timeout_s": 9.0}), 5.0)


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(python.sandbox, "why_not", lambda: "bwrap is not installed")
    with pytest.raises(EpisodeError, match="cannot be isolated: bwrap is not installed") as caught:
        bind("python", {})
    assert "install bubblewrap" in caught.value.remedy
