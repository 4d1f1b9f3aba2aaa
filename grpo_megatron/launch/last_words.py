"""What the log of a process that ended says about why."""

import re

_NUM_LINES = 15
_POINTS_UP = "See root cause above"
"""vLLM's server says so of an engine process that ended before it, whose own words are further up
than the server's traceback is long."""
_TRACEBACK = "Traceback (most recent call last)"
_CAUSE = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: |CUDA error|\berror: ")
_PASSING = re.compile(r" (WARNING|INFO|DEBUG) ")


def telling_lines(log: str, most: int = _NUM_LINES) -> list[str]:
    """Return the last lines of a log; where they point up to a cause, that line comes first."""
    lines = log.splitlines()
    last = lines[-most:]
    if not any(_POINTS_UP in line for line in last):
        return last
    cause = _cause_above(lines)
    if cause is None or cause in last:
        return last
    return [cause, "…", *last]


def _cause_above(lines: list[str]) -> str | None:
    """Return the last line with an error before the last traceback."""
    before = len(lines)
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            before = number
    for line in reversed(lines[:before]):
        if _CAUSE.search(line) and not _PASSING.search(line):
            return line
    return None
