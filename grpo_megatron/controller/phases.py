"""Seconds by phase, and the phase that is shown: one of the loop's before what runs beside it."""

import contextlib
import time
from collections.abc import Iterator

from grpo_megatron.controller.display import show


class Phases:
    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._entered = False
        self._sampling = "rollout"

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as those of phase `name`."""
        show("phase", name=name)
        started = time.perf_counter()
        self._entered = True
        try:
            yield
        finally:
            self._entered = False
            seconds = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def sampling(self, name: str | None = None) -> None:
        """Samples are now in phase `name`, "rollout" or "reward" (None: still in the last one),
        which is shown unless the loop is inside a phase of its own."""
        self._sampling = name or self._sampling
        if not self._entered:
            show("phase", name=self._sampling)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds = self._seconds
        self._seconds = {}
        return seconds
