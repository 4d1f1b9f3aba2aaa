"""Rewards of programs by tests. What decides runs outside of the candidate's interpreter, which the
candidate may do with what it likes (docs/rewards.md)."""

import ast
import asyncio
import json
import math
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards import sandbox
from grpo_megatron.rewards.argument_checks import check_number, check_tags, check_whole_number
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.sandbox import MIB, Limits, ProgramOutcome

_FENCE = re.compile(r"\s*(?P<item>(?:[-*+]|\d{1,3}[.)])\s+)?(?P<ticks>`{3,})(?P<rest>[^`]*)")
"""A line that opens or closes a block of code, maybe as the beginning of an item of a list."""
_END_OF_LINE = re.compile(r"\r\n?|\n")
_LANGUAGE = re.compile(r"\s*(?:[\w+#.-]*\w[+#]*|(?=\{))(?:\s*\{.*\}|(?:\s+[\w-]+=\S+)+)?\s*")
"""What stands behind the backticks that open a block, and behind none that close one: a word, maybe
with attributes."""
_INSIDE = {"/inside.py": Path(__file__).with_name("inside.py").read_text()}
_WITH_PRELUDE = {"/with_prelude.py": Path(__file__).with_name("with_prelude.py").read_text()}
_LEAST_SHARE_OF_PROGRAMS = 0.5
"""Of the time: where starting programs takes more than the rest, the time decides, not they."""
_OWN_TIME = 4
"""Times the longest earlier run that a program must have had to be slow by itself: runs of one
program differ, on a busy machine by more than a mean can tell."""
_NUM_PROBES = 3
"""Idle programs that are started to see how long a start takes: one may be lucky."""


class Tests(NamedTuple):
    """Tests of a program: pairs of input and output, or asserts."""

    pairs: Sequence[tuple[str, str]]
    asserts: Sequence[str]
    setup: str
    """Runs before the asserts, out of the program's reach."""
    prelude: str
    """Runs before the program, which has its names."""


def _check(
    *, mode: str = "all", timeout_s: float = 4.0, memory_mib: int = 512, **tags: object
) -> None:
    if mode not in ("all", "fraction"):
        raise RewardError(f"mode = {mode!r}", remedy='"all" or "fraction"')
    check_number("timeout_s", timeout_s, above=0)
    check_whole_number("memory_mib", memory_mib, least=1)
    check_tags(**tags)
    reason = sandbox.why_not()
    if reason:
        raise RewardError(f"programs cannot be isolated: {reason}", remedy=sandbox.REMEDY)


@needs(check=_check)
def code_tests(
    completion: str,
    answer: str,
    *,
    mode: str = "all",
    answer_tag: str | None = None,
    think_tag: str | None = None,
    timeout_s: float = 4.0,
    memory_mib: int = 512,
) -> float:
    """1 where the completion's Python program passes every test, else 0; NaN where the tests are
    no good; with `mode = "fraction"` the share that passes. The answer is JSON (docs/rewards.md).
    All tests together have `timeout_s` of wall time.

    RewardError where the sandbox fails, or where so many programs cannot start in that time."""
    tests = _parse(answer)
    if tests is None:
        return math.nan
    part = extract(completion, answer_tag, think_tag) or ""
    program = last_code_block(part)
    if not program and answer_tag:
        program = part
    if not program:
        return 0.0
    limits = Limits(wall_s=timeout_s, memory_bytes=memory_mib * MIB)
    if tests.pairs:
        running = _share_of_pairs(program, tests, limits, stop_early=mode == "all")
    else:
        running = _share_of_asserts(program, tests, limits)
    share = asyncio.run(running)
    if mode == "fraction" or math.isnan(share):
        return share
    return float(share == 1)


async def _share_of_pairs(program: str, tests: Tests, limits: Limits, *, stop_early: bool) -> float:
    end = time.monotonic() + limits.wall_s
    passed = 0
    longest_s = 0.0
    for number, (given, expected) in enumerate(tests.pairs, start=1):
        left = replace(
            limits,
            wall_s=max(0.0, end - time.monotonic()),
            output_bytes=limits.output_bytes + len(expected.encode(errors="replace")),
        )
        outcome = await _run(program, tests.prelude, given, left)
        printed = outcome.stdout.decode(errors="replace")
        good = outcome.exit_code == 0 and _lines(printed) == _lines(expected)
        passed += good
        if outcome.ending == "timed_out":
            has_used_own_time = number > 1 and left.wall_s >= _OWN_TIME * longest_s
            if not has_used_own_time:
                await _refuse_slow_starts(number, tests, limits)
            break
        longest_s = max(longest_s, left.wall_s - (end - time.monotonic()))
        if stop_early and not good:
            break
    return passed / len(tests.pairs)


async def _run(program: str, prelude: str, given: str, limits: Limits) -> ProgramOutcome:
    """Run a program that reads and prints. Raises RewardError where the sandbox fails."""
    files = {"/program.py": program}
    arguments: list[str] = []
    if prelude:
        files = {**_WITH_PRELUDE, "/prelude.py": prelude, "/program.py": program}
        arguments = ["/prelude.py", "/program.py"]
    outcome = await sandbox.run(files, given, limits=limits, arguments=arguments)
    if outcome.ending == "failed":
        raise _failed(outcome)
    return outcome


def _failed(outcome: ProgramOutcome) -> RewardError:
    told = outcome.stderr.decode(errors="replace").strip()[-200:]
    return RewardError(f"a program could not be isolated: {told or 'no reason is known'}")


async def _refuse_slow_starts(num_started: int, tests: Tests, limits: Limits) -> None:
    """Raise RewardError where the time is over because starting so many programs took most of it:
    no program would have had more."""
    share_s = limits.wall_s * (1 - _LEAST_SHARE_OF_PROGRAMS) / num_started
    for _ in range(_NUM_PROBES):
        idle = await _run(tests.prelude, "", "", replace(limits, wall_s=share_s))
        if idle.ending == "timed_out":
            raise RewardError(
                f"timeout_s = {limits.wall_s:g} is too short to start a program for each of "
                f"{len(tests.pairs)} tests",
                remedy="raise timeout_s and data.reward_timeout_s, or give fewer tests",
            )


async def _share_of_asserts(program: str, tests: Tests, limits: Limits) -> float:
    our_end, their_end = socket.socketpair()
    ours = our_end.detach()
    theirs = their_end.detach()
    candidate = asyncio.ensure_future(
        sandbox.run(
            {**_INSIDE, "/prelude.py": tests.prelude, "/program.py": program},
            limits=replace(limits, wall_s=2 * limits.wall_s),
            arguments=("serve", str(theirs), "/prelude.py", "/program.py"),
            give_fds=(theirs,),
        )
    )
    gold = {"setup": tests.setup, "asserts": tests.asserts}
    judge = await sandbox.run(
        _INSIDE, json.dumps(gold), limits=limits, give_fds=(ours,), arguments=("judge", str(ours))
    )
    candidate.cancel()  # which the judge's end ends: the time is the judge's
    await asyncio.gather(candidate, return_exceptions=True)
    if judge.ending == "failed":
        raise _failed(judge)
    marks = judge.stdout
    if not marks.startswith(b"s") or b"?" in marks:
        return math.nan
    return marks.count(b"1") / len(tests.asserts)


def _parse(answer: str) -> Tests | None:
    """Return the tests, or None where they are no good."""
    try:
        data = json.loads(answer)
        pairs = list(zip(data.get("inputs", ()), data.get("outputs", ()), strict=True))
        asserts = list(data.get("asserts", ()))
        tests = Tests(pairs, asserts, data.get("setup", ""), data.get("prelude", ""))
        for source in (*asserts, tests.setup, tests.prelude):
            ast.parse(source)
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError):
        return None
    has_one_kind = bool(pairs) != bool(asserts)
    are_texts = all(isinstance(given, str) and isinstance(out, str) for given, out in pairs)
    if has_one_kind and are_texts:
        return tests
    return None


def extract(completion: str, tag: str | None, think_tag: str | None = None) -> str | None:
    """Return the last closed `<tag>…</tag>`'s content; None where there is none; all without a tag.
    think_tag: only what stands behind the last thought counts, None where none was closed."""
    if think_tag is not None:
        _, thought, completion = completion.rpartition(f"</{think_tag}>")
        if not thought:
            return None
    if tag is None:
        return completion
    head, closed, _ = completion.rpartition(f"</{tag}>")
    _, opened, content = head.rpartition(f"<{tag}>")
    if not (closed and opened):
        return None
    return content


def last_code_block(completion: str) -> str:
    """Return the content of the last closed block between lines of three or more backticks, or
    nothing; without the indentation of the line that opens it.

    A word behind the backticks opens a block, also where the one before was left open; other
    backticks close the block that is open, whatever stands behind them."""
    lines = _END_OF_LINE.split(completion)  # only where Python ends one
    program = ""
    opening: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            continue
        has_language = fence["rest"].strip() and _LANGUAGE.fullmatch(fence["rest"])
        if opening is None or has_language:
            opening = fence
            start = number + 1
        elif not fence["item"] and len(fence["ticks"]) >= len(opening["ticks"]):
            block = lines[start:number]
            program = "\n".join(_without_indent(block, opening.start("ticks")))
            opening = None
    return program


def _without_indent(block: Sequence[str], width: int) -> list[str]:
    """Return the lines of a block without the indentation of its fence, if they have it."""
    for line in block:
        if line.strip():
            if line[:width].strip():
                return list(block)
            break
    return [line[:width].lstrip() + line[width:] for line in block]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
