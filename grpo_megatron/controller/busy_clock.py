"""A clock that runs while anything is going on."""

import time


class BusyClock:
    """Seconds in which at least one of several things was going on."""

    def __init__(self) -> None:
        self._num_running = 0
        self._counted_until = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        """One more is going on."""
        self._count()
        self._num_running += 1

    def end(self) -> None:
        """One of them has ended."""
        self._count()
        self._num_running -= 1

    def take(self) -> float:
        """Return the seconds since the last call."""
        self._count()
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def _count(self) -> None:
        now = time.perf_counter()
        if self._num_running:
            self._seconds += now - self._counted_until
        self._counted_until = now
