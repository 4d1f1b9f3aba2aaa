"""No process outlives the one that it works for."""

import ctypes
import os
import signal
import sys

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Linux: get signal `number` when process `parent`, which started this one, ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended in between
        os.kill(os.getpid(), number)
