"""The system calls that a sandboxed program is refused, as a classic BPF filter (seccomp(2)).

No process but the first, so that its address space bounds the memory of all; nothing that holds
memory beside the address space (memfd, SysV and POSIX queues, sockets by name); nothing that only
an attack on the kernel needs. Threads and files stay possible.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _NOT_PERMITTED, _NO_CALL = (
    0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS)
_CLONE_THREAD = 0x10000

# From here on all architectures number alike: io_uring, clone3, the new mount calls, pidfd_getfd …
# ENOSYS makes C libraries fall back to the calls from before Linux 5.1.
_FIRST_NEW_CALL = 424

ARCHITECTURES = {  # AUDIT_ARCH_…, clone, refused calls
    "x86_64": (0xC000003E, 56, (57, 58, 101, 310, 311, 272, 308, 165, 166, 155, 161, 321, 298, 323,
                                319, 29, 68, 64, 240, 41, 248, 249, 250, 304, 90, 91, 268, 92, 93,
                                94, 260)),
    "aarch64": (0xC00000B7, 220, (117, 270, 271, 97, 268, 40, 39, 41, 51, 280, 241, 282, 279, 194,
                                  186, 190, 180, 198, 217, 218, 219, 265, 52, 53, 55, 54)),
}
"""fork, vfork (x86_64); ptrace, process_vm_readv and _writev; unshare, setns, mount, umount2,
pivot_root, chroot; bpf, perf_event_open, userfaultfd; memfd_create, shmget, msgget, semget,
mq_open, socket; add_key, request_key, keyctl; open_by_handle_at; chmod (x86_64), fchmod, fchmodat,
chown (x86_64), fchown, lchown (x86_64), fchownat: a bound device may be the user's own outside."""


def program() -> bytes:
    """The filter for this machine, as `bwrap --seccomp` reads it."""
    architecture, clone, refused = ARCHITECTURES[platform.machine()]
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture),
             (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT),
             (_AT_LEAST, 0, 1, _FIRST_NEW_CALL), (_RETURN, 0, 0, _NO_CALL)]
    for number in refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOT_PERMITTED)]
    steps += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (
        _ANY_BIT, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _NOT_PERMITTED), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
