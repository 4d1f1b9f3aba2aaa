"""Rewards of programs by tests. What decides runs outside of the candidate's interpreter, which the
candidate may do with what it likes (docs/rewards.md)."""

import ast
import asyncio
import json
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards import sandbox
from grpo_megatron.rewards.argument_checks import check_number, check_tags, check_whole_number
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.sandbox import MIB, Limits

_FENCE = re.compile(r"\s*(?P<item>(?:[-*+]|\d{1,3}[.)])\s+)?(?P<ticks>`{3,})(?P<rest>[^`]*)")
"""A line that opens or closes a block of code, maybe as the beginning of an item of a list."""
_LANGUAGE = re.compile(r"\s*(?:[\w+#.-]*\w[+#]*|(?=\{))(?:\s*\{.*\}|(?:\s+[\w-]+=\S+)+)?\s*")
"""What stands behind the backticks that open a block, and behind none that close one: a word, maybe
with attributes."""
_INSIDE = {"/inside.py": Path(__file__).with_name("inside.py").read_text()}


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
    no good or the sandbox fails; with `mode = "fraction"` the share that passes. The answer is JSON
    (docs/rewards.md). All tests together have `timeout_s` of wall time."""
    tests = _parse(answer)
    if tests is None:
        return math.nan
    part = extract(completion, answer_tag, think_tag) or ""
    program = last_code_block(part)
    if not program and answer_tag:
        program = part
    if not program:
        return 0.0
    pairs, gold = tests
    limits = Limits(wall_s=timeout_s, memory_bytes=memory_mib * MIB)
    if pairs:
        running = _share_of_pairs(program, pairs, limits, stop_early=mode == "all")
    else:
        running = _share_of_asserts(program, gold, limits)
    share = asyncio.run(running)
    if mode == "fraction" or math.isnan(share):
        return share
    return float(share == 1)


async def _share_of_pairs(
    program: str, pairs: Sequence[tuple[str, str]], limits: Limits, *, stop_early: bool
) -> float:
    end = time.monotonic() + limits.wall_s
    passed = 0
    for given, expected in pairs:
        left = replace(limits, wall_s=max(0.0, end - time.monotonic()))
        outcome = await sandbox.run({"/program.py": program}, given, limits=left)
        if outcome.ending == "failed":
            return math.nan
        printed = outcome.stdout.decode(errors="replace")
        good = outcome.exit_code == 0 and _lines(printed) == _lines(expected)
        passed += good
        if outcome.ending == "timed_out" or (stop_early and not good):
            break
    return passed / len(pairs)


async def _share_of_asserts(program: str, gold: Mapping[str, Any], limits: Limits) -> float:
    our_end, their_end = socket.socketpair()
    ours = our_end.detach()
    theirs = their_end.detach()
    candidate = asyncio.ensure_future(
        sandbox.run(
            {**_INSIDE, "/program.py": program},
            limits=replace(limits, wall_s=2 * limits.wall_s),
            arguments=("serve", str(theirs), "/program.py"),
            give_fds=(theirs,),
        )
    )
    judge = await sandbox.run(
        _INSIDE, json.dumps(gold), limits=limits, give_fds=(ours,), arguments=("judge", str(ours))
    )
    candidate.cancel()  # which the judge's end ends: the time is the judge's
    await asyncio.gather(candidate, return_exceptions=True)
    marks = judge.stdout
    unscorable = judge.ending == "failed" or not marks.startswith(b"s") or b"?" in marks
    if unscorable:
        return math.nan
    return marks.count(b"1") / len(gold["asserts"])


def _parse(answer: str) -> tuple[list[tuple[str, str]], dict[str, Any]] | None:
    """Return pairs or asserts (with their setup), or None where they are no good."""
    try:
        data = json.loads(answer)
        pairs = list(zip(data.get("inputs", ()), data.get("outputs", ()), strict=True))
        gold = {"asserts": list(data.get("asserts", ())), "setup": data.get("setup", "")}
        for source in (*gold["asserts"], gold["setup"]):
            ast.parse(source)
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError):
        return None
    has_one_kind = bool(pairs) != bool(gold["asserts"])
    are_texts = all(isinstance(given, str) and isinstance(out, str) for given, out in pairs)
    if has_one_kind and are_texts:
        return pairs, gold
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
    lines = completion.splitlines()
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
    return [line.rstrip() for line in text.rstrip().splitlines()]
