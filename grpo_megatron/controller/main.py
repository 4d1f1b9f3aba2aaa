"""The controller process: `python -m grpo_megatron.controller.main RUN_DIR ATTEMPT`.

A line on standard input, or SIGTERM, stops the run after the current step, with a checkpoint. The
end of standard input is that of the supervisor, which no run outlives."""

import asyncio
import contextlib
import logging
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.controller.display import claim_stdout, show
from grpo_megatron.errors import INTERRUPTED_EXIT_CODE, GrpoMegatronError, as_own_error

_GRACE_S = 5.0
"""How long a controller without a supervisor has to end by itself."""


def main(run_path: str, attempt: str) -> int:
    """Run the run in `run_path` to its end; returns the exit code."""
    claim_stdout()  # before any library can print
    stop = StopSignal()
    from grpo_megatron import progress
    from grpo_megatron.config.loader import read_resolved
    from grpo_megatron.controller.run import run
    from grpo_megatron.rundir import RunDir

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    run_dir = RunDir(Path(run_path), attempt)
    progress.start_progress(run_dir.role_progress("controller"), "controller")
    try:
        config = read_resolved(run_dir.config).config
        finished = asyncio.run(run(config, run_dir, stop.listen_for))
    except Exception as error:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
        error = as_own_error(error, GrpoMegatronError)
        show("failure", text=error.message, where=error.where, remedy=error.remedy)
        return error.exit_code
    if not finished:
        return INTERRUPTED_EXIT_CODE
    return 0


class StopSignal:
    """Ends the process at a signal: at once before the first training step, when nothing is lost;
    later by telling its loop.

    grace_s: how long that loop may take where the supervisor has died. Nobody starts dead engines
    and ranks again then, so that it may wait for them in vain."""

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self._grace_s = grace_s
        self._tell: Callable[[], object] = self._end
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._tell())
        threading.Thread(target=self._read, daemon=True).start()

    def listen_for(self, stopping: asyncio.Event) -> None:
        """Set `stopping`, in the running event loop, when told to stop from now on."""
        loop = asyncio.get_running_loop()
        self._tell = lambda: loop.call_soon_threadsafe(stopping.set)

    def _read(self) -> None:
        # a signal would reach the reward processes too, through Slurm
        while sys.stdin.readline():
            self._tell()
        if _is_pipe(sys.stdin.fileno()):  # else nobody was there to begin with
            self._end_alone()

    def _end_alone(self) -> None:
        """End without a supervisor; does not return."""
        with contextlib.suppress(OSError):
            print("the supervisor has died: this run ends", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):  # of a loop that has just closed
            self._tell()
        time.sleep(self._grace_s)
        os._exit(INTERRUPTED_EXIT_CODE)

    def _end(self) -> None:
        show("message", text="stopped before the first step")
        os._exit(INTERRUPTED_EXIT_CODE)


def _is_pipe(descriptor: int) -> bool:
    """Whether another process is, or was, at the other end."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # libraries' threads must not delay the end of a run
