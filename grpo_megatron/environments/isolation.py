"""Limits of a process of environments, which it puts on itself before it imports any (Linux).

They hold for the environment's code, which is trusted not to attack the machine, against what goes
wrong: memory, endless loops, leaks of files, connections. Programs that the policy writes run in
`rewards.sandbox`, which trusts nobody."""

import ctypes
import errno
import math
import os
import platform
import resource
import socket
import struct
import time

from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards import seccomp

MAX_FILES = 4096

_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
_SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
_ALLOWED_FAMILIES = (socket.AF_UNIX, socket.AF_NETLINK)  # the second sets up a sandbox's loopback
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_ALL_THREADS = 1
_REFUSE = 0x50000 | errno.EACCES
_IO_URING_SETUP = 425
_FIRST_OF_X32 = 0x40000000  # x86-64: the same calls under other numbers


def limit_memory_and_files(memory_bytes: int) -> None:
    """Bound the address space and the open files of this process and of what it starts."""
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_NOFILE, MAX_FILES)
    _lower(resource.RLIMIT_CORE, 0)


def allow_cpu(seconds: float) -> None:
    """Let this process use so much CPU time from now on; past it the kernel ends it. Whoever gives
    this again and again keeps it alive."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time() + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        until = min(until, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (until, hard))


def refuse_network() -> None:
    """No thread of this process, and nothing that it starts, can open a socket but those of this
    machine's files. EpisodeError where the kernel does not take the filter."""
    machine = platform.machine()
    if machine not in _SOCKET_CALL:
        raise EpisodeError(
            f"processes of environments cannot be kept off the network on {machine}",
            remedy=f"use a machine of {' or '.join(_SOCKET_CALL)}",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    program = _filter(machine)
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, pointer to them
    wanted = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    refused = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        _SECCOMP_CALL[machine], _SET_MODE_FILTER, _ALL_THREADS, wanted
    )
    if refused:
        raise EpisodeError(
            "processes of environments cannot be kept off the network: "
            + os.strerror(ctypes.get_errno()),
            remedy="allow seccomp filters, for example in the container's profile",
        )


def _filter(machine: str) -> bytes:
    steps = [
        (seccomp.LOAD, 0, 0, seccomp.ARCHITECTURE_AT),
        (seccomp.EQUAL, 1, 0, seccomp.ARCHITECTURES[machine]["audit"]),
        (seccomp.RETURN, 0, 0, seccomp.KILL),
        (seccomp.LOAD, 0, 0, seccomp.NUMBER_AT),
        (seccomp.AT_LEAST, 0, 1, _FIRST_OF_X32),
        (seccomp.RETURN, 0, 0, seccomp.NO_CALL),
        (seccomp.EQUAL, 0, 1, _IO_URING_SETUP),
        (seccomp.RETURN, 0, 0, seccomp.NO_CALL),
        (seccomp.EQUAL, 1, 0, _SOCKET_CALL[machine]),
        (seccomp.RETURN, 0, 0, seccomp.ALLOW),
        (seccomp.LOAD, 0, 0, seccomp.FIRST_ARGUMENT_AT),
    ]
    for family in _ALLOWED_FAMILIES:
        steps += [(seccomp.EQUAL, 0, 1, int(family)), (seccomp.RETURN, 0, 0, seccomp.ALLOW)]
    steps.append((seccomp.RETURN, 0, 0, _REFUSE))
    return seccomp.assembled(steps)


def _lower(kind: int, limit: int) -> None:
    """Both limits, to no more than they are."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
