"""In every Python process that finds this file first: `time.time` jumps, by hours, there and back.

What Python's own threads and locks wait by is the monotonic clock, which stays as it is."""

import itertools
import time

_actual = time.time
# A process asks for the time but a few times in a step.
_jumps = itertools.cycle([0.0] * 2 + [86400.0] * 2 + [-86400.0] * 2)


def _jumping() -> float:
    return _actual() + next(_jumps)


time.time = _jumping
