"""No process outlives the one that it works for."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Linux: get signal `number` when process `parent`, which started this one, ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended in between
        os.kill(os.getpid(), number)


class Worker(NamedTuple):
    """A process that works for this one.

    Attributes:
        process: Whose `stdout` is None: its end does not wait for who else holds the pipe.
        link: The other end of its socket.
        output: The end of the pipe that it prints into."""

    process: asyncio.subprocess.Process
    link: socket.socket
    output: BinaryIO


async def start_worker(module: str) -> Worker:
    """Start `python -m MODULE SOCKET PARENT_PID`.

    It finds the modules that this process finds and computes with one thread. It is in a session of
    its own: Ctrl-C reaches the parent only, a kill of the group also what it has started."""
    ours, theirs = socket.socketpair()
    python_path = [entry or os.getcwd() for entry in sys.path]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # there are many workers
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    read_end, write_end = os.pipe()
    output = os.fdopen(read_end, "rb", buffering=0)
    with contextlib.ExitStack() as unless_started:
        unless_started.enter_context(ours)
        unless_started.enter_context(output)
        process = await _started(module, theirs, write_end, environment)
        unless_started.pop_all()
    return Worker(process, ours, output)


async def _started(
    module: str, theirs: socket.socket, write_end: int, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start the process with its ends of socket and pipe, which are closed here."""
    with theirs, open(write_end, "wb") as printed:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=environment,
        )
