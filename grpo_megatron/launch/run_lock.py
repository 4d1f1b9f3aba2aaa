"""One writer per run directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_megatron.errors import RunLockedError
from grpo_megatron.rundir import RunDir


@contextmanager
def run_lock(run_dir: RunDir) -> Iterator[None]:
    """Hold the directory's lock; the kernel drops it when the process ends, however it ends.

    Raises:
        RunLockedError: another process holds it.
    """
    with open(run_dir.lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise RunLockedError(f"{run_dir.root} is being written by {owner}",
                                 remedy="wait for it, or stop it") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield
