"""Start the ranks of a conversion, show how far they are, pass on their error."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from grpo_megatron.errors import GrpoMegatronError, TrainerError
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.roles import free_port
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.network import LOOPBACK
from grpo_megatron.rundir import RunDir


def convert(job: dict[str, Any], num_ranks: int) -> None:
    """Run `job` (see `trainer.convert.Job`) with `num_ranks` processes on this machine.

    Raises:
        GrpoMegatronError: what the first rank that failed said.
        RunLockedError: another process converts to the same directory.
    """
    with tempfile.TemporaryDirectory() as folder, _claimed(job["target"]), _Screen() as screen:
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
    threads, port = max((os.cpu_count() or 1) // num_ranks, 1), str(free_port())
    return [ChildProcess(
        f"rank-{rank}", [sys.executable, "-m", "grpo_megatron.trainer.convert", str(job)],
        job.with_name(f"rank-{rank}.log"),
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
         "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "",
         "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"},
        piped=True) for rank in range(num_ranks)]


@contextmanager
def _claimed(target: str | None) -> Iterator[None]:
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


def _watch(ranks: list[ChildProcess], screen: _Screen) -> None:
    pipes = {rank.process.stdout.fileno(): rank for rank in ranks}
    buffers = dict.fromkeys(pipes, b"")
    while pipes:
        for fd in wait_readable([], list(pipes), timeout_s=1.0):
            block = os.read(fd, 1 << 16)
            if not block:
                _ended(pipes.pop(fd))
                continue
            *lines, buffers[fd] = (buffers[fd] + block).split(b"\n")
            for line in lines:
                screen.show(json.loads(line))


def _ended(rank: ChildProcess) -> None:
    rank.process.wait()
    if rank.exit_code:
        raise TrainerError(str(rank.end()), remedy="run the same command again to go on")


class _Screen:
    """A bar a phase on a terminal; a line a finished phase and a message everywhere."""

    def __enter__(self) -> _Screen:
        self._console = Console()
        self._bar = Progress(
            TextColumn("{task.description:>10}"), BarColumn(), DownloadColumn(),
            TransferSpeedColumn(), TimeRemainingColumn(), console=self._console,
            disable=not self._console.is_terminal)
        self._tasks: dict[str, Any] = {}
        self._totals: dict[str, int] = {}
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, message: dict[str, Any]) -> None:
        """Raises GrpoMegatronError where the message is one."""
        if "error" in message:
            text, where, remedy = message["error"]
            error = GrpoMegatronError(text, where=where, remedy=remedy)
            error.exit_code = message["exit_code"]
            raise error
        phase = message.get("phase")
        if "total" in message:
            self._totals[phase] = message["total"]
            self._tasks[phase] = self._bar.add_task(phase, total=message["total"])
        elif "bytes" in message and phase in self._tasks:
            self._bar.advance(self._tasks[phase], message["bytes"])
        elif "seconds" in message:
            total, seconds = self._totals[phase] / 1e9, message["seconds"]
            self._print(f"{phase}: {total:.3f} GB in {seconds:.1f} s, "
                        f"{total / max(seconds, 1e-9):.2f} GB/s")
        elif "message" in message:
            self._print(message["message"])

    def _print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
