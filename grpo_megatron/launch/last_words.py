"""What the log of a process that ended says about why."""

import re
from collections.abc import Sequence

_NUM_LINES = 15
_MOST_CHARACTERS = 200
_POINTS_UP = "See root cause above"
"""vLLM's server says so of an engine process that ended before it, whose own words are further up
than the server's traceback is long."""
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: |CUDA error|\berror: ")
_PASSING = re.compile(r" (WARNING|INFO|DEBUG) ")


def telling_lines(log: str, most: int = _NUM_LINES) -> list[str]:
    """Return the last lines of a log; where they point up to a cause, that line comes first."""
    lines = log.splitlines()
    last = lines[-most:]
    cause = _cause_above(lines)
    if cause and cause not in last:
        return [cause, "…", *last]
    return last


def error_of(log: str) -> str:
    """Return the line with the error that ended a process, at most 200 characters; empty where its
    last words are no error: it was killed, or ended without a word."""
    lines = log.splitlines()
    error = _cause_above(lines)
    if not error and lines and _is_error(lines[-1]):
        error = lines[-1]
    return error.strip()[:_MOST_CHARACTERS]


def _cause_above(lines: Sequence[str]) -> str:
    """Return the last line with an error before the last traceback; empty where the last lines do
    not point up to it, or there is none."""
    if not any(_POINTS_UP in line for line in lines[-_NUM_LINES:]):
        return ""
    before = len(lines)
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            before = number
    for line in reversed(lines[:before]):
        if _is_error(line):
            return line
    return ""


def _is_error(line: str) -> bool:
    return _ERROR.search(line) is not None and _PASSING.search(line) is None
