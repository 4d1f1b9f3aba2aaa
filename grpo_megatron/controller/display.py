"""What the supervisor shows: one JSON object a line on this process's standard output.

Kinds: `phase` (name), `step` (metrics, samples); with a text `message`, `result`, and `failure`
(where, remedy, each may be null); `left` (engine): it has no requests any more and may be ended."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from grpo_megatron import progress

# Libraries print to standard output too: keep the pipe, give them standard error.
_PIPE = os.fdopen(os.dup(1), "w", buffering=1)


def claim_stdout() -> None:
    """Let only `show` write to the supervisor from now on."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr


def show(kind: str, **fields: Any) -> None:
    """Send one message; a supervisor that has gone is not an error."""
    with contextlib.suppress(BrokenPipeError):
        _PIPE.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")


def show_phase(name: str, detail: str = "") -> None:
    """Begin a phase of the run, and of this process."""
    progress.enter(name, detail)
    show("phase", name=name)


class Phases:
    """Seconds by phase, and the phase that is shown: one of the loop's own (train, publish, …)
    before the sampling that runs beside it (rollout, reward).

    Attributes:
        subject: Which step it is, for the screen."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._entered = False
        self._sampling = "rollout"
        self.subject = ""

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Show phase `name`, and count the seconds of the block as its own."""
        show_phase(name, self.subject)
        started = time.perf_counter()
        self._entered = True
        try:
            yield
        finally:
            self._entered = False
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def show_sampling(self, name: str | None = None) -> None:
        """Samples are now in phase `name`, "rollout" or "reward" (None: still in the last one),
        which is shown unless the loop is inside a phase of its own."""
        self._sampling = name or self._sampling
        if not self._entered:
            show_phase(self._sampling, self.subject)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        seconds = self._seconds
        self._seconds = {}
        return seconds
