"""The system calls that a sandboxed program is refused, as a classic BPF filter (seccomp(2)).

No process but the first, so that its address space bounds the memory of all; nothing that holds
memory beside the address space (memfd, SysV and POSIX queues, sockets by name, extended attributes,
watches); nothing that has others wait; nothing that only an attack on the kernel needs. Threads and
files stay possible."""

import errno
import platform
import struct
from collections.abc import Sequence

from grpo_megatron import assets

# instructions of the classic BPF machine (linux/bpf_common.h)
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# offsets in struct seccomp_data
NUMBER_AT = 0
ARCHITECTURE_AT = 4
FIRST_ARGUMENT_AT = 16
ALLOW = 0x7FFF0000
KILL = 0x80000000
_NOT_PERMITTED = 0x50000 | errno.EPERM
NO_CALL = 0x50000 | errno.ENOSYS
_CLONE_THREAD = 0x10000

# From here on all architectures number alike: io_uring, clone3, the new mount calls, pidfd_getfd …
# ENOSYS makes C libraries fall back to the calls from before Linux 5.1.
_FIRST_NEW_CALL = 424

ARCHITECTURES = assets.tables(__file__, "seccomp.toml")


def program() -> bytes:
    """Return the filter for this machine, as `bwrap --seccomp` reads it."""
    numbers = ARCHITECTURES[platform.machine()]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, numbers["audit"]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, _FIRST_NEW_CALL),
        (RETURN, 0, 0, NO_CALL),
    ]
    for number in numbers["refused"].values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, _NOT_PERMITTED)]
    steps += [
        (EQUAL, 0, 3, numbers["clone"]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (ANY_BIT, 1, 0, _CLONE_THREAD),
        (RETURN, 0, 0, _NOT_PERMITTED),
        (RETURN, 0, 0, ALLOW),
    ]
    return assembled(steps)


def assembled(steps: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Instructions (code, jump where true, jump where false, operand) as the kernel reads them."""
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
