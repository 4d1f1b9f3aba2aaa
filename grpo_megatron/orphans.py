"""No process outlives the one that it works for."""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Linux: get signal `number` when process `parent`, which started this one, ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended in between
        os.kill(os.getpid(), number)


async def start_worker(
    module: str, log_path: Path
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start `python -m MODULE SOCKET PARENT_PID`; returns it with the other end of its socket.

    It finds the modules that this process finds, computes with one thread, and appends what it
    prints to `log_path`. It is in a session of its own: Ctrl-C reaches the parent only, a kill of
    the group also what it has started."""
    ours, theirs = socket.socketpair()
    python_path = [entry or os.getcwd() for entry in sys.path]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # there are many workers
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    with theirs, log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=environment,
        )
    return process, ours
