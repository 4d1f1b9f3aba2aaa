"""Seconds by phase, and the phase that is shown: one of the loop's before what runs beside it."""

import contextlib
import time
from collections import Counter

from grpo_megatron.controller.display import show


class Phases:
    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._entered, self._sampling = False, "rollout"

    @contextlib.contextmanager
    def __call__(self, name: str):
        show("phase", name=name)
        started, self._entered = time.perf_counter(), True
        try:
            yield
        finally:
            self._entered = False
            self.seconds[name] += time.perf_counter() - started

    def sampling(self, name: str | None = None) -> None:
        """Samples are now in phase `name`, "rollout" or "reward" (None: still in the last one),
        which is shown unless the loop is inside a phase of its own."""
        self._sampling = name or self._sampling
        if not self._entered:
            show("phase", name=self._sampling)

    def take_seconds(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, Counter()
        return seconds
