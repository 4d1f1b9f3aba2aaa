"""Which dead processes are started again, and when."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from grpo_megatron.launch.processes import ChildProcess

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class Restarts:
    """Each process is started again `most` times, the first time after two seconds, then after
    twice the pause before.

    Attributes:
        counts: Of restarts, planned ones too, by process."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self.most = most
        self.counts: Counter[str] = Counter()
        self._due_s: dict[str, float] = {}
        self._clock = clock

    def plan(self, name: str) -> float | None:
        """Plan the next start of a process that has died, in so many seconds; None: there is none
        left."""
        if self.counts[name] >= self.most:
            return None
        pause_s = min(FIRST_PAUSE_S * float(2 ** self.counts[name]), LONGEST_PAUSE_S)
        self.counts[name] += 1
        self._due_s[name] = self._clock() + pause_s
        return pause_s

    def are_planned(self, children: Iterable[ChildProcess]) -> bool:
        """Whether one of these will be started."""
        return any(child.name in self._due_s for child in children)

    def take_due(self, name: str) -> bool:
        """Whether a planned start is due, which is then no longer planned."""
        if self._clock() < self._due_s.get(name, float("inf")):
            return False
        del self._due_s[name]
        return True
