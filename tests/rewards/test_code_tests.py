"""Programs by their tests: the honest pass, no trick does, and bad tests score nobody."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grpo_megatron.errors import RewardError
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
def test_a_failing_sandbox_is_unscorable(monkeypatch):
    monkeypatch.setattr(sandbox.seccomp, "program", lambda: b"no filter")
    assert math.isnan(code_tests(block("print(1)"), pairs(("", "1"))))
    assert math.isnan(code_tests(block("def f(x): return x"), asserts("assert f(1)")))


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
