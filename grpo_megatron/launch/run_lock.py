"""One writer per run directory."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from grpo_megatron.errors import RunLockedError, SetupError, raised_as
from grpo_megatron.launch.slurm import is_active
from grpo_megatron.rundir import RunDir


@contextmanager
def run_lock(run_dir: RunDir) -> Iterator[None]:
    """Hold the directory's lock; the kernel drops it when the process ends. RunLockedError where
    another has it, or its Slurm job has not ended: some locks do not reach beyond a node.
    SetupError where it can be no lock: a folder, a link to nowhere, one that may not be written."""
    job = os.environ.get("SLURM_JOB_ID", "")
    with run_dir.written():
        run_dir.root.mkdir(parents=True, exist_ok=True)
    with _opened(run_dir.lock) as file:
        file.seek(0)
        owner = file.read().strip()
        other = re.search(r"Slurm job (\d+)", owner)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = not other or other[1] == job or not is_active(other[1])
        except OSError:
            is_free = False
        if not is_free:
            raise RunLockedError(
                f"{run_dir.root} is being written by {owner or 'another process'}",
                remedy="wait for it, or stop it",
            )
        file.truncate(0)
        holder = f"process {os.getpid()} on {os.uname().nodename}"
        if job:
            holder += f", Slurm job {job}"
        file.write(holder)
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _opened(lock: Path) -> TextIO:
    remedy = "remove it, where nothing writes the directory"
    with raised_as(SetupError, "cannot open the lock", OSError, where=lock, remedy=remedy):
        return open(lock, "a+", encoding="utf-8", errors="replace")
