"""What the supervisor shows: one JSON object a line on this process's standard output.

Kinds: `phase` (name), `step` (metrics, samples); with a text `message`, `failure`, `result`."""

import contextlib
import json
import os
import sys
from typing import Any

# Libraries print to standard output too: keep the pipe, give them standard error.
_PIPE = os.fdopen(os.dup(1), "w", buffering=1)


def claim_stdout() -> None:
    """From now on only `show` writes to the supervisor."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def show(kind: str, **fields: Any) -> None:
    """Send one message; a supervisor that has gone is not an error."""
    with contextlib.suppress(BrokenPipeError):
        _PIPE.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
