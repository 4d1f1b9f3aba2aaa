"""The system calls that a sandboxed program is refused, as a classic BPF filter (seccomp(2)).

No process but the first, so that its address space bounds the memory of all; nothing that holds
memory beside the address space (memfd, SysV and POSIX queues, sockets by name); nothing that only
an attack on the kernel needs. Threads and files stay possible."""

import errno
import platform
import struct

from grpo_megatron import assets

# instructions of the classic BPF machine (linux/bpf_common.h)
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# offsets in struct seccomp_data
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_FIRST_ARGUMENT_AT = 16
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NOT_PERMITTED = 0x50000 | errno.EPERM
_NO_CALL = 0x50000 | errno.ENOSYS
_CLONE_THREAD = 0x10000

# From here on all architectures number alike: io_uring, clone3, the new mount calls, pidfd_getfd …
# ENOSYS makes C libraries fall back to the calls from before Linux 5.1.
_FIRST_NEW_CALL = 424

ARCHITECTURES = assets.tables(__file__, "seccomp.toml")


def program() -> bytes:
    """Return the filter for this machine, as `bwrap --seccomp` reads it."""
    numbers = ARCHITECTURES[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, numbers["audit"]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _FIRST_NEW_CALL),
        (_RETURN, 0, 0, _NO_CALL),
    ]
    for number in numbers["refused"].values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOT_PERMITTED)]
    steps += [
        (_EQUAL, 0, 3, numbers["clone"]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _NOT_PERMITTED),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
