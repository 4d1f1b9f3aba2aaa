"""Untrusted Python programs in a bubblewrap sandbox (Linux).

What a program may see and use up, and what bounds it: docs/rewards.md."""

import asyncio
import contextlib
import ctypes
import fcntl
import math
import os
import platform
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from grpo_megatron.rewards import seccomp

MIB = 2**20
REMEDY = (
    "install bubblewrap 0.7 or newer (apt-get install bubblewrap) and allow it user "
    "namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a container "
    "whose seccomp profile permits them"
)
_MAX_THREADS = 64
_MAX_FILES = 64
_LIBC = ctypes.CDLL(None)
_LIBC.personality.argtypes = [ctypes.c_ulong]
_ADDR_NO_RANDOMIZE = 0x0040000
_ONLY_ASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program: seconds of wall time, bytes of address space, bytes of /tmp (all of
    it, and any one file), bytes of standard output and of standard error (each)."""

    wall_s: float = 4.0
    memory_bytes: int = 512 * MIB
    tmp_bytes: int = 16 * MIB
    output_bytes: int = MIB


@dataclass(slots=True)
class ProgramOutcome:
    """How a program ended (`failed`: the sandbox did, `stderr` says why), and what it wrote."""

    ending: Literal["exited", "timed_out", "flooded", "failed"] = "failed"
    exit_code: int | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)


async def run(
    files: Mapping[str, str],
    stdin: str = "",
    *,
    limits: Limits,
    arguments: Sequence[str] = (),
    give_fds: Sequence[int] = (),
    hash_seed: int | None = None,
) -> ProgramOutcome:
    """Run a Python program, the first of `files` (content by path), to its end or until cancelled;
    nothing of it stays behind. `give_fds`, sockets for it, keep their numbers and are closed
    here. hash_seed: runs of one seed hash texts alike, and have their objects at the same addresses
    where the kernel lets them; each run does its own way otherwise."""
    outcome = ProgramOutcome()
    variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    isolation = ["-I"]
    prepare = None
    if hash_seed is not None:
        prepare = _keep_addresses
        # -I is -E, -s and -P. -E would hide the seed, and there is nothing else for it to hide.
        isolation = ["-s", "-P"]
        variables["PYTHONHASHSEED"] = str(hash_seed % 2**32)
    status, status_fd = os.pipe()
    with open(status, "rb", 0) as report, contextlib.ExitStack() as theirs:
        for fd in (status_fd, *give_fds):
            theirs.callback(os.close, fd)
        data = {}
        for path, content in files.items():
            data[path] = _memory_file(theirs, content.encode(errors="replace"))
        filter_fd = _memory_file(theirs, seccomp.program())
        process = await asyncio.create_subprocess_exec(
            *_command(limits, data, filter_fd, status_fd, isolation),
            *arguments,
            stdin=_memory_file(theirs, stdin.encode(errors="replace")),
            stdout=PIPE,
            stderr=PIPE,
            env=variables,
            pass_fds=(*data.values(), filter_fd, status_fd, *give_fds),
            start_new_session=True,
            preexec_fn=prepare,
        )
        theirs.close()
        # Read to the end in any case: asyncio waits for no process whose output nobody reads.
        assert process.stdout is not None and process.stderr is not None  # both are pipes
        ended = asyncio.gather(
            process.wait(),
            _read(process.stdout, outcome.stdout, limits.output_bytes, process),
            _read(process.stderr, outcome.stderr, limits.output_bytes, process),
        )
        try:
            async with asyncio.timeout(limits.wall_s):
                await asyncio.shield(ended)
        except TimeoutError:
            outcome.ending = "timed_out"
        finally:
            _kill(process)
            await ended
        if max(len(outcome.stdout), len(outcome.stderr)) == limits.output_bytes:
            outcome.ending = "flooded"
        # bubblewrap reports the exit of what it could start, and nothing where it could not.
        if outcome.ending == "failed" and b"exit-code" in report.read(4096):
            outcome.ending = "exited"
            outcome.exit_code = process.returncode
    return outcome


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why programs cannot be isolated on this machine; None where they can (tried once)."""
    if sys.platform != "linux" or platform.machine() not in seccomp.ARCHITECTURES:
        return f"only on Linux on {' and '.join(seccomp.ARCHITECTURES)}"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    probe = run({"/program.py": "print('isolated')"}, limits=Limits(wall_s=30.0))
    with ThreadPoolExecutor() as thread:  # the caller may be inside of an event loop
        outcome = thread.submit(asyncio.run, probe).result()
    if outcome.exit_code == 0 and outcome.stdout == b"isolated\n":
        return None
    return outcome.stderr.decode(errors="replace").strip() or f"a program has {outcome.ending}"


def _command(
    limits: Limits,
    data: Mapping[str, int],
    filter_fd: int,
    status_fd: int,
    isolation: Sequence[str],
) -> list[str]:
    visible = (
        "/usr",
        "/bin",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        os.path.realpath(sys.base_prefix),
    )
    mounts: list[str] = []
    for path in visible:
        mounts += ["--ro-bind-try", path, path]
    for path, fd in data.items():
        mounts += ["--ro-bind-data", str(fd), path]
    limited = {
        "as": limits.memory_bytes,
        "cpu": math.ceil(limits.wall_s) + 1,
        "core": 0,
        "fsize": limits.tmp_bytes,
        "nofile": _MAX_FILES,
        "nproc": _MAX_THREADS,
    }
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
        "--size",
        str(limits.tmp_bytes),
        "--tmpfs",
        "/tmp",
        *mounts,
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        "--seccomp",
        str(filter_fd),
        "--json-status-fd",
        str(status_fd),
        "--",
        "prlimit",
        *(f"--{name}={value}" for name, value in limited.items()),
        os.path.realpath(sys.executable),
        *isolation,
        "-B",
        next(iter(data)),
    ]


def _keep_addresses() -> None:
    """Have what this process starts lie at the same addresses each time, unless the kernel, or a
    container's profile, refuses that."""
    _LIBC.personality(_LIBC.personality(_ONLY_ASK) | _ADDR_NO_RANDOMIZE)


async def _read(
    stream: asyncio.StreamReader, into: bytearray, limit: int, process: asyncio.subprocess.Process
) -> None:
    while True:
        piece = await stream.read(2**16)
        if not piece:
            return
        into += piece[: limit - len(into)]
        if len(into) == limit:
            _kill(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and its group: a bubblewrap that fails early leaves its child there, with
    our pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> int:
    """Return a file without a path that nobody can change: a pipe could block, a disk could
    fill."""
    fd = os.memfd_create("sandbox", os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd
