"""Run parts one after another, each in processes of its own: none can hide what the others show."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from grpo_megatron.errors import DataError
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.roles import QUIET
from grpo_megatron.prove.causes import HUNG, KILLED, UNKNOWN, Cause, likely_cause
from grpo_megatron.prove.conditions import PRETENDING, Conditions
from grpo_megatron.prove.evidence import EVIDENCE_FILE, Evidence, read_evidence
from grpo_megatron.prove.part import Part

Status = Literal["passed", "failed", "impossible"]
Say = Callable[[str], object]
LOG_FILE = "log.txt"
_LOG_LINES = 200
_SHOWN_LINES = 25
_LONGEST_LINE = 400
_SLOWER_WHEN_PRETENDED = 2.0
"""A CPU that is busy with other work takes longer than a GPU."""
_KILLED = 128 + signal.SIGKILL


class Outcome(msgspec.Struct, kw_only=True):
    """How a part went."""

    part: str
    shows: str
    status: Status
    seconds: float = 0.0
    evidence: Evidence = msgspec.field(default_factory=Evidence)
    problem: str = ""
    """What went wrong, or why the part is not possible here; empty where it passed."""
    cause: str = ""
    """What a failure most likely comes from."""
    remedy: str = ""
    last_lines: list[str] = []
    """Of the log of a part that failed."""


def run_parts(
    parts: Sequence[Part],
    conditions: Conditions,
    folder: Path,
    minutes: float,
    say: Say,
    after_each: Callable[[list[Outcome]], object],
) -> list[Outcome]:
    """Run `parts` within `minutes` in folders below `folder`; one outcome each, in their order.

    after_each: gets all outcomes so far, so that a page of them can be written even if this process
    is ended."""
    deadline = time.monotonic() + 60.0 * minutes
    outcomes: list[Outcome] = []
    for part in parts:
        outcome = _run_part(part, conditions, folder / part.name, deadline - time.monotonic(), say)
        outcomes.append(outcome)
        say(as_line(outcome))
        after_each(outcomes)
    return outcomes


def as_line(outcome: Outcome) -> str:
    """Return one line: `passed device (34 s)`."""
    mark = {"passed": "passed", "failed": "FAILED", "impossible": "not here"}[outcome.status]
    line = f"{mark:9} {outcome.part}"
    if outcome.status != "impossible":
        line += f" ({outcome.seconds:.0f} s)"
    if outcome.problem:
        line += f": {outcome.problem.splitlines()[0]}"
    if outcome.remedy:
        line += f"\n          likely: {outcome.cause}\n          remedy: {outcome.remedy}"
    return line


def _run_part(
    part: Part, conditions: Conditions, folder: Path, seconds_left: float, say: Say
) -> Outcome:
    outcome = Outcome(part=part.name, shows=part.shows, status="impossible")
    outcome.problem = part.why_not(conditions)
    if not outcome.problem and seconds_left < part.usual_s:
        outcome.problem = (
            f"it takes about {part.usual_s:.0f} s, and {max(seconds_left, 0):.0f} s are left of "
            "the time that was given (--minutes)"
        )
    if outcome.problem:
        return outcome
    say(f"--- {part.name}: {part.shows}")
    limit_s = part.limit_s
    if conditions.is_pretended:
        limit_s *= _SLOWER_WHEN_PRETENDED
    limit_s = min(limit_s, seconds_left)
    started = time.monotonic()
    child, in_time = run_child(part.name, part.function, folder, conditions, limit_s)
    outcome.seconds = time.monotonic() - started
    _judge(outcome, child, folder, in_time=in_time, limit_s=limit_s)
    return outcome


def run_child(
    name: str, function: str, folder: Path, conditions: Conditions, limit_s: float
) -> tuple[ChildProcess, bool]:
    """Run `module:name` as a part in `folder`; all that it started ends with it.

    Returns the process, which has ended, and whether it ended by itself in time."""
    folder.mkdir(parents=True)
    environment = dict(QUIET)
    if conditions.is_pretended:
        environment.update(PRETENDING)
    child = ChildProcess(
        name,
        [sys.executable, "-m", "grpo_megatron.prove.child", function, str(folder)],
        folder / LOG_FILE,
        environment,
    )
    deadline = time.monotonic() + limit_s
    try:
        child.start()
        while child.alive and time.monotonic() < deadline:
            wait_readable([child], [], deadline - time.monotonic())
        in_time = not child.alive
    finally:
        stop_all([child], grace_s=2.0)
    return child, in_time


def _judge(
    outcome: Outcome, child: ChildProcess, folder: Path, *, in_time: bool, limit_s: float
) -> None:
    """Say how a part went that was run, from its exit code, its evidence and its log."""
    lines = last_lines(folder / LOG_FILE)
    code = child.exit_code or 0
    fallback = UNKNOWN
    try:
        outcome.evidence = read_evidence(folder / EVIDENCE_FILE)
    except DataError as error:
        outcome.problem = error.message
    evidence = outcome.evidence
    if not in_time:
        outcome.problem = f"it had not ended after {limit_s:.0f} s and was ended"
        fallback = HUNG
    elif code == _KILLED:
        outcome.problem = "its process was killed (SIGKILL)"
        fallback = KILLED
    elif evidence.error:
        outcome.problem = evidence.error
    elif code:
        outcome.problem = f"its process ended with exit code {code}"
        if code > 128:
            outcome.problem = f"its process was ended by signal {code - 128}"
    elif evidence.failed:
        whats = [check.what for check in evidence.failed]
        outcome.problem = f"does not hold: {'; '.join(whats)}"
    elif not evidence.finished and not outcome.problem:
        outcome.problem = "it ended without having said what it shows"
    if not outcome.problem:
        outcome.status = "passed"
        if evidence.impossible:
            outcome.status = "impossible"
            outcome.problem = evidence.impossible
        return
    outcome.status = "failed"
    cause = cause_of(outcome, lines, fallback)
    outcome.cause = cause.what
    outcome.remedy = cause.remedy
    outcome.last_lines = lines[-_SHOWN_LINES:]


def cause_of(outcome: Outcome, lines: Sequence[str], fallback: Cause) -> Cause:
    """Find the likely cause of a failure in its messages, then in the log."""
    said = [outcome.problem]
    for check in outcome.evidence.failed:
        said.append(check.detail)
    return likely_cause("\n".join(said)) or likely_cause("\n".join(lines)) or fallback


def last_lines(path: Path, most: int = _LOG_LINES) -> list[str]:
    """Return the last lines of a log, printable and cut to a length that can be shown."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError:
        return []
    lines = []
    for line in text.splitlines()[-most:]:
        for character in set(line):
            if not character.isprintable():
                line = line.replace(character, " ")
        lines.append(line[:_LONGEST_LINE])
    return lines
