"""Which dead processes are started again, and when."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from grpo_megatron.errors import CRASHED_EXIT_CODE, TrainerError
from grpo_megatron.launch.processes import ChildProcess, End

REMEDY_OF_REFUSALS = (
    "change the flags of the job or the site, or what the recipe asks of a node, then go on"
)
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
        """Plan the next start of a process that has died; returns in how many seconds, None: it has
        no start left."""
        if self.counts[name] >= self.most:
            return None
        pause_s = min(FIRST_PAUSE_S * float(2 ** self.counts[name]), LONGEST_PAUSE_S)
        self.counts[name] += 1
        self._due_s[name] = self._clock() + pause_s
        return pause_s

    def forget(self, name: str) -> None:
        """Count the restarts of a process from none again; none is planned."""
        self.counts.pop(name, None)
        self._due_s.pop(name, None)

    def are_left(self, name: str) -> bool:
        """Whether a process would be started again if it died now."""
        return self.counts[name] < self.most

    def are_planned(self, children: Iterable[ChildProcess]) -> bool:
        """Whether one of these will be started."""
        return any(child.name in self._due_s for child in children)

    def take_due(self, name: str) -> bool:
        """Whether a planned start is due, which is then no longer planned."""
        if self._clock() < self._due_s.get(name, float("inf")):
            return False
        del self._due_s[name]
        return True


_FIRST_SIGNAL_CODE = 129  # 128 + 1, as shells report what a signal ended


def was_killed(end: End) -> bool:
    """Whether a signal ended the process."""
    return end.exit_code >= _FIRST_SIGNAL_CODE


def first_cause(ends: Sequence[End]) -> End:
    """Return, among the ends of trainer ranks with an error, the one that the others may have
    followed: a killed rank, else one with an error that has a name, else one that crashed, maybe
    because a collective lost a member."""

    def order(end: End) -> int:
        if was_killed(end):
            return 0
        if end.exit_code != CRASHED_EXIT_CODE:
            return 1
        return 2

    return min(ends, key=order)


def may_train_again(ends: Sequence[End]) -> bool:
    """Whether training that ended so may get further from a checkpoint.

    What was killed (no memory, a lost GPU, a hang) or crashed in a library may. An error with a
    name of its own says what a user has to change: damaged files, a full disk, weights that differ,
    and, as a TrainerError, a loss that is no number. Ranks that lost a killed one may report a
    TrainerError too, from their rendezvous."""
    is_killed = any(was_killed(end) for end in ends)
    for end in ends:
        if was_killed(end) or end.exit_code == CRASHED_EXIT_CODE:
            continue
        if end.exit_code != TrainerError.exit_code or not is_killed:
            return False
    return True
