"""Programs by their tests: the honest pass, no trick does, and bad tests score nobody."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards import code_tests as code_tests_module
from grpo_megatron.rewards import sandbox
from grpo_megatron.rewards.functions import code_tests
from grpo_megatron.rewards.registry import bind
from tests.rewards import programs
from tests.rewards.reward_pools import domain, group, score
from tests.rewards.sandboxes import needs_sandbox, wait_until_none_is_left

REFERENCE = "grpo_megatron.rewards.functions:code_tests"
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3", "assert f(-1) != 1"]
PATIENT = {"timeout_s": 60.0, "memory_mib": 256}


def block(program):
    return f"So:\n```python\n{program}\n```\nDone."


def asserts(*sources, **more):
    return json.dumps({"asserts": sources, **more})


def pairs(*found):
    return json.dumps({"inputs": [i for i, _ in found], "outputs": [o for _, o in found]})


def scores(cases, **arguments):
    """Scores by name of {name: (program, answer)}, four at a time."""
    with ThreadPoolExecutor(4) as threads:
        futures = {
            name: threads.submit(code_tests, block(program), answer, **{**PATIENT, **arguments})
            for name, (program, answer) in cases.items()
        }
    return {name: future.result() for name, future in futures.items()}


@needs_sandbox
def test_honest_programs_pass():
    cases = {
        name: (program, pairs((given, expected)))
        for name, (program, given, expected) in programs.HONEST_PAIRS.items()
    }
    cases |= {
        f"assert {name}": (program, asserts(*sources, setup=setup))
        for name, (program, sources, setup) in programs.HONEST_ASSERTS.items()
    }
    assert scores(cases) == dict.fromkeys(cases, 1.0)


@needs_sandbox
@pytest.mark.parametrize("name", programs.CHEATS)
def test_tricks_do_not_score(name):
    limits = dict(PATIENT)
    if name in programs.SLOW_CHEATS:
        limits["timeout_s"] = 2.0
    assert code_tests(block(programs.CHEATS[name]), asserts(*ASSERTS), **limits) == 0.0


@needs_sandbox
@pytest.mark.parametrize("kind", ["REFUSED", "ENDLESS", "FLOODS"])
def test_attacks_score_zero(kind):
    sources = dict(list(getattr(programs, kind).items())[:8])
    cases = {
        name: (programs.PRELUDE.replace("REFUSED", "") + source, pairs(("", "ESCAPED")))
        for name, source in sources.items()
    }
    assert scores(cases, timeout_s=2.0) == dict.fromkeys(cases, 0.0)


@needs_sandbox
def test_a_fraction_of_the_tests():
    wrong_at_two = "n = int(input())\nprint(n + 1 if n != 2 else 0)"
    tests = pairs(("1", "2"), ("2", "3"), ("3", "4"), ("4", "5"))
    assert code_tests(block(wrong_at_two), tests, mode="fraction", **PATIENT) == 0.75
    assert code_tests(block(wrong_at_two), tests, **PATIENT) == 0.0
    program = "def f(x):\n    return 1 / (x - 2) and x + 1"
    assert code_tests(block(program), asserts(*ASSERTS), mode="fraction", **PATIENT) == 2 / 3
    hangs_at_two = "n = int(input())\nwhile n == 2: pass\nprint(n + 1)"
    assert code_tests(block(hangs_at_two), tests, mode="fraction", timeout_s=3.0) == 0.25


@needs_sandbox
def test_what_is_wrong_in_the_output():
    tests = pairs(("", "1 2\n3\n"))
    outputs = {
        "'1 2\\n3'": 1,
        "'1 2  \\n3\\n\\n'": 1,
        "'1  2\\n3'": 0,
        "'1 2 3'": 0,
        "' 1 2\\n3'": 0,
        "'1 2\\n3\\n4'": 0,
        "'1 2\\r\\n3'": 1,
        "'1 2\\x0c3'": 0,
        "'1 2\\x853'": 0,
    }
    cases = {text: (f"print({text})", tests) for text in outputs}
    cases["code"] = ("print('1 2\\n3')\nraise SystemExit(1)", tests)
    assert scores(cases) == {**outputs, "code": 0}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no JSON",
        "3",
        "[]",
        "{}",
        '{"inputs": ["1"], "outputs": []}',
        pairs((1, 2)),
        pairs(),
        asserts(),
        asserts("assert f(("),
        asserts("assert 1", setup="import ("),
        asserts(3),
        '{"asserts": 3}',
        '{"asserts": ["assert f()"], "inputs": [""], "outputs": [""]}',
        '{"inputs": 3, "outputs": 3}',
        '{"inputs": ["1"], "outputs": ["2"], "prelude": "import ("}',
        '{"inputs": ["1"], "outputs": ["2"], "prelude": 3}',
        "[" * 10**5,
    ],
)
def test_bad_tests_are_unscorable(answer):
    assert math.isnan(code_tests(block("pass"), answer))


@needs_sandbox
def test_asserts_that_cannot_be_asked_are_unscorable():
    program = "def f(x): return x\ndef sum(x): return 0"
    cases = {
        source: (program, asserts(source))
        for source in ("assert sum([1]) == 1", "assert f(lambda: 1)", "assert True", "")
    }
    cases["setup"] = (program, asserts("assert f(1)", setup="import no_such_module"))
    cases["prelude"] = (program, asserts("assert f(1)", prelude="import no_such_module"))
    assert all(math.isnan(value) for value in scores(cases).values())


@needs_sandbox
def test_the_standard_library_in_an_assert_is_not_the_candidates():
    program = "class math:\n    isclose = staticmethod(lambda *_: True)\ndef f(): return 1.0"
    assert code_tests(block(program), asserts("assert math.isclose(f(), 2.0)"), **PATIENT) == 0


def test_only_the_program_counts(monkeypatch):
    tests = pairs(("", "1"))
    for completion in ("no program", "```\nprint(1)", ""):
        assert code_tests(completion, tests) == 0.0
    assert code_tests(block("print(1)"), tests, answer_tag="answer") == 0.0


@needs_sandbox
@pytest.mark.parametrize("completion", ["<a>print(1)</a>", f"<a>{block('print(1)')}</a>"])
def test_programs_in_a_tag(completion):
    assert code_tests(completion, pairs(("", "1")), answer_tag="a", **PATIENT) == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "answer"),
    [("print(1)", pairs(("", "1"))), ("def f(x): return x", asserts("assert f(1)"))],
)
def test_a_failing_sandbox_is_a_failure_of_the_reward(monkeypatch, program, answer):
    """And so makes the sample unscorable, also beside other rewards."""
    monkeypatch.setattr(sandbox.seccomp, "program", lambda: b"no filter")
    with pytest.raises(RewardError, match="a program could not be isolated: "):
        code_tests(block(program), answer)


@needs_sandbox
def test_an_output_may_be_as_long_as_the_test_wants():
    program = "n = int(input())\nprint('\\n'.join(str(i * 7) for i in range(n)))"
    expected = "\n".join(str(number * 7) for number in range(200_000))
    assert len(expected) > sandbox.MIB
    assert code_tests(block(program), pairs(("200000", expected)), **PATIENT) == 1
    assert code_tests(block(program), pairs(("2000000", expected)), **PATIENT) == 0


@needs_sandbox
@pytest.mark.parametrize("mode", ["all", "fraction"])
def test_more_tests_than_can_start_in_the_time_are_told(mode):
    many = pairs(*[("1", "1")] * 10_000)
    with pytest.raises(RewardError, match="too short to start a program for each of 10000 tests"):
        code_tests(block("print(1)"), many, timeout_s=1.0, mode=mode)
    assert code_tests(block("while True: pass"), many, timeout_s=2.0) == 0
    assert code_tests(block("print(2)"), many, **PATIENT) == 0


@needs_sandbox
def test_a_program_that_does_not_end_is_not_a_slow_start(monkeypatch):
    """However much of the time the starts before it have taken."""
    name = "grpo_megatron.rewards.code_tests._LEAST_SHARE_OF_PROGRAMS"
    monkeypatch.setattr(name, 1.0)  # all starts are slow
    hangs = "if input() == '1':\n    while True: pass\nprint(1)"
    tests = pairs(*[(str(number), "1") for number in range(40)])
    assert code_tests(block(hangs), tests, timeout_s=3.0) == 0


class Runs:
    """Programs that pass and take seconds as said, by a clock of their own; `starts_s`: what idle
    ones take."""

    def __init__(self, seconds, starts_s):
        self.now_s = 0.0
        self.seconds = iter(seconds)
        self.starts_s = iter(starts_s)

    def monotonic(self):
        return self.now_s

    async def run(self, program, prelude, given, limits):
        takes_s = next(self.seconds if program else self.starts_s)
        self.now_s += min(takes_s, limits.wall_s)
        if takes_s > limits.wall_s:
            return sandbox.ProgramOutcome("timed_out")
        return sandbox.ProgramOutcome("exited", 0, bytearray(b"1"))


@needs_sandbox
@pytest.mark.parametrize(
    ("seconds", "starts_s"),
    [
        ([0.1] * 100, [0.1]),
        ([2.0], [0.6]),
        ([0.1] * 9 + [0.3], [0.1]),  # the last had more than the mean
        ([0.1, 0.25] * 3 + [0.4], [0.02, 0.03, 0.1]),  # idle ones are lucky at first
    ],
)
def test_uneven_starts_are_slow_starts(monkeypatch, seconds, starts_s):
    runs = Runs(seconds, starts_s)
    monkeypatch.setattr(code_tests_module, "time", runs)
    monkeypatch.setattr(code_tests_module, "_run", runs.run)
    with pytest.raises(RewardError, match="too short to start"):
        code_tests(block("print(1)"), pairs(*[("1", "1")] * 100), timeout_s=1.0)


@needs_sandbox
@pytest.mark.parametrize(
    ("seconds", "starts_s"),
    [
        ([2.0], [0.1] * 3),
        ([0.1, 2.0], []),  # it had nine times what the first had
        ([0.3] * 4, [0.01] * 3),  # the programs are slow, not their starts
    ],
)
def test_programs_that_are_slow_themselves_fail(monkeypatch, seconds, starts_s):
    runs = Runs(seconds, starts_s)
    monkeypatch.setattr(code_tests_module, "time", runs)
    monkeypatch.setattr(code_tests_module, "_run", runs.run)
    assert code_tests(block("print(1)"), pairs(*[("1", "1")] * 100), timeout_s=1.0) == 0


PRELUDE = "from typing import *\nimport math\nlimit = 3"


@needs_sandbox
def test_a_program_has_the_names_of_the_prelude():
    signature = "class Solution:\n    def f(self, numbers: List[int]) -> int:\n"
    cases = {
        "a method": (
            f"{signature}        return math.gcd(*numbers)",
            asserts("assert Solution().f([4, 6]) == 2", prelude=PRELUDE),
        ),
        "a future": (
            f'"""It can."""\nfrom __future__ import annotations\n{signature}        return limit',
            asserts("assert Solution().f([]) == 3", prelude=PRELUDE),
        ),
    }
    printing = {
        "names": "print(math.gcd(4, 6))",
        "a name in a function": "def f(x: int): return math.gcd(x, 6)\nprint(f(4))",
        "an annotation": "def f(x: List[int]): return x\nprint(f(2))",
        "its own names": "import sys\nlimit = 2\nif __name__ == '__main__':\n    print(limit)",
        "a future": "from __future__ import annotations\nprint(math.gcd(4, 6))",
        "a declared global": "def f():\n    global x\n    x = 2\nf()\nprint(x)",
        "a class of its own": "import pickle\nclass A: x = 2\n"
        "print(pickle.loads(pickle.dumps(A())).x)",
        "exit": "print(2)\nexit()",
    }
    for name, program in printing.items():
        tests = json.dumps({"inputs": [""], "outputs": ["2"], "prelude": PRELUDE})
        cases[f"printing {name}"] = (program, tests)
    assert scores(cases) == dict.fromkeys(cases, 1.0)
    wrong = {
        "no prelude": ("print(math.gcd(4, 6))", pairs(("", "2"))),
        "no program": ("print((2)", json.dumps({"inputs": [""], "outputs": ["2"], "prelude": "2"})),
        "exit code": (
            "print(2)\nexit(1)",
            json.dumps({"inputs": [""], "outputs": ["2"], "prelude": PRELUDE}),
        ),
    }
    assert scores(wrong) == dict.fromkeys(wrong, 0.0)


@needs_sandbox
def test_what_a_call_raises_ends_no_loop_of_an_assert():
    program = "def f(x): raise StopIteration"
    assert code_tests(block(program), asserts("assert all(map(f, [1, 2]))"), **PATIENT) == 0


def test_without_a_sandbox_the_recipe_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "why_not", lambda: "bwrap is not installed")
    with pytest.raises(RewardError, match="cannot be isolated: bwrap is not installed") as caught:
        bind(REFERENCE, {})
    assert "apt-get" in str(caught.value)


@needs_sandbox
def test_in_the_pool():
    texts = [block("print(int(input()) + 1)"), block("while True: pass"), "none"]
    code = {"function": REFERENCE, "arguments": {"timeout_s": 2.0}}
    [scored], pool = score([domain(code)], [group(texts, answer=pairs(("1", "2")))], timeout_s=60)
    np.testing.assert_equal(scored.rewards, [1, 0, 0])
    assert not any(pool.take_metrics().values())


@needs_sandbox
def test_a_killed_worker_takes_its_sandboxes_along():
    code = {"function": REFERENCE, "arguments": {"timeout_s": 1000.0, "memory_mib": 257}}
    honest = block("print(2)\ndef f(x): return x + 1 if x > 0 else 0")
    for answer in (pairs(("1", "2")), asserts(*ASSERTS)):
        texts = [honest, block("while True: pass")]
        [scored], pool = score([domain(code)], [group(texts, answer=answer)], timeout_s=4)
        np.testing.assert_equal(scored.rewards, [1, math.nan])
        assert pool.take_metrics()["reward/d.code_tests/timed_out"] == 1
        wait_until_none_is_left(f"--as={257 * sandbox.MIB}")
