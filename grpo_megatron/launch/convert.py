"""Start the ranks of a conversion, show how far they are, pass on their error."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import progress

from grpo_megatron.errors import TrainerError
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.roles import QUIET, rank_variables
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.protocol import raise_reply

_WORKER = "grpo_megatron.trainer.conversion_worker"


def convert(job: dict[str, Any], num_ranks: int) -> None:
    """Run `job`, a `ConversionJob` of `_WORKER`; raises what a rank said, or RunLockedError."""
    screen = _Screen()
    with tempfile.TemporaryDirectory() as folder, _claimed(job["target"]), screen.bar:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job))
        ranks = _ranks(file, num_ranks)
        try:
            for rank in ranks:
                rank.start()
            _watch(ranks, screen)
        finally:
            stop_all(ranks)


def _ranks(job: Path, num_ranks: int) -> list[ChildProcess]:
    """On the CPU, whatever the machine has: bytes are moved, not computed with."""
    store = job.with_name("store")
    command = [sys.executable, "-m", _WORKER, str(job), str(store)]
    ranks = []
    for rank in range(num_ranks):
        log = job.with_name(f"rank-{rank}.log")
        env = QUIET | rank_variables(rank, num_ranks) | {"CUDA_VISIBLE_DEVICES": ""}
        ranks.append(ChildProcess(f"rank-{rank}", command, log, env, piped=True))
    return ranks


@contextmanager
def _claimed(target: str | None) -> Iterator[None]:
    """Hold the lock of the directory in which `target` is made; None: nothing is written."""
    if target is None:
        yield
        return
    working = RunDir(Path(target + ".partial"))
    working.root.mkdir(parents=True, exist_ok=True)
    try:
        with run_lock(working):
            yield
    finally:
        if working.root.exists() and [p.name for p in working.root.iterdir()] == [".lock"]:
            shutil.rmtree(working.root)  # nothing was begun


def _watch(ranks: list[ChildProcess], screen: "_Screen") -> None:
    """Show what ranks print until all have ended; TrainerError where one fails."""
    pipes = {rank.output: rank for rank in ranks}
    buffers = dict.fromkeys(pipes, b"")
    while pipes:
        for fd in wait_readable([], list(pipes), timeout_s=1.0):
            block = os.read(fd, 1 << 16)
            if not block:
                rank = pipes.pop(fd)
                if rank.started.wait():
                    raise TrainerError(str(rank.end()), remedy="run the command again to go on")
                continue
            *lines, buffers[fd] = (buffers[fd] + block).split(b"\n")
            for line in lines:
                screen.show(json.loads(line))


class _Screen:
    """A bar a phase on a terminal; a line a finished phase and a message everywhere."""

    def __init__(self) -> None:
        self.bar = progress.Progress(
            progress.TextColumn("{task.description:>10}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        self._tasks: dict[str, tuple[progress.TaskID, int]] = {}

    def show(self, message: dict[str, Any]) -> None:
        """Show a rank's message; raises the error that it may be."""
        match message:
            case {"error": _}:
                raise_reply(message)
            case {"phase": phase, "total": total}:
                self._tasks[phase] = (self.bar.add_task(phase, total=total), total)
            case {"phase": phase, "bytes": count} if phase in self._tasks:
                self.bar.advance(self._tasks[phase][0], count)
            case {"phase": phase, "seconds": seconds}:
                size = self._tasks[phase][1] / 1e9
                self._print(
                    f"{phase}: {size:.3f} GB in {seconds:.1f} s, "
                    f"{size / max(seconds, 1e-9):.2f} GB/s"
                )
            case {"message": text}:
                self._print(text)

    def _print(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
