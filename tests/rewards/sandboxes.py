"""Which tests need a sandbox, and how to see that none is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo_megatron.rewards import sandbox

_REASON = sandbox.why_not()
needs_sandbox = pytest.mark.skipif(_REASON is not None, reason=f"no sandbox here: {_REASON}")


def wait_until_none_is_left(argument: object) -> None:
    """Every sandbox has a first process, whose command line has its limits. The test's own time
    limit ends a failure."""
    while _with_argument(str(argument).encode()):
        time.sleep(0.02)


def _with_argument(argument: bytes) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:  # it has just ended
            continue
    return found
