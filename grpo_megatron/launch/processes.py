"""Child processes that cannot outlive their supervisor, and whose death is noticed at once."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from grpo_megatron.launch.last_words import error_of, telling_lines
from grpo_megatron.orphans import die_with_parent


@dataclass(frozen=True)
class End:
    """Which process ended, how, and where it logged; as text with what its log says.

    Attributes:
        refusal: Why Slurm has made no step for it, so that it never was; empty: it was."""

    name: str
    exit_code: int
    log: Path
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"srun makes no step for {self.name}: {self.refusal}"
        told = [f"{self.name} ended with exit code {self.exit_code}"]
        told += [f"    {self.name}| {line}" for line in telling_lines(self._logged())]
        return "\n".join(told)

    @property
    def error(self) -> str:
        """The line of the log with the error that ended it; empty where it was killed."""
        return error_of(self._logged())

    def _logged(self) -> str:
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""


@dataclass
class ChildProcess:
    """One role, in a process group of its own, with its output in a log file."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    piped: bool = False  # standard output and input are pipes to the supervisor
    not_inherited: Sequence[str] = ()
    """Variables of the supervisor that it does not get."""
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1

    def start(self) -> None:
        """Start it. It is killed when the supervisor dies, even by SIGKILL (piped: SIGTERM)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            stdin: int = subprocess.DEVNULL
            stdout: int = log.fileno()
            at_death = signal.SIGKILL  # vLLM loses a SIGTERM while it starts
            if self.piped:
                stdin = subprocess.PIPE
                stdout = subprocess.PIPE
                at_death = signal.SIGTERM
            inherited = {**os.environ}
            for variable in self.not_inherited:
                inherited.pop(variable, None)
            self.process = subprocess.Popen(
                self.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=log,
                start_new_session=True,
                env={**inherited, **self.env},
                preexec_fn=partial(die_with_parent, os.getpid(), at_death),
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    @property
    def started(self) -> subprocess.Popen[bytes]:
        """The process, of a child that was started."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process

    @property
    def output(self) -> int:
        """File descriptor of the standard output of a piped child."""
        assert self.started.stdout is not None, f"{self.name} is not piped"
        return self.started.stdout.fileno()

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code as a shell reports it: 128 + signal for a killed process."""
        if self.process is None:
            return None
        code = self.process.poll()
        if code is not None and code < 0:
            return 128 - code
        return code

    def signal_group(self, number: int) -> bool:
        """Signal the process and everything it started; False where nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            if self.process is not None:
                os.killpg(self.process.pid, number)
                return True
        return False

    def end(self) -> End:
        """Say how it ended; it has."""
        return End(self.name, self.exit_code or 0, self.log)

    def close_pipes(self) -> None:
        """Close those of a piped child that has ended."""
        for pipe in (self.started.stdin, self.started.stdout):
            if pipe is not None:
                pipe.close()

    def write_line(self, line: str) -> None:
        """Write to its standard input; one that has gone is not an error."""
        stdin = self.started.stdin
        assert stdin is not None, f"{self.name} is not piped"
        with contextlib.suppress(BrokenPipeError):
            os.write(stdin.fileno(), line.encode() + b"\n")


def wait_readable(
    children: Sequence[ChildProcess], files: Sequence[int], timeout_s: float
) -> list[int]:
    """Wait until a child ends, one of `files` is readable or the time is up; returns which of
    `files` are readable. That a child has ended is for the caller to see (`alive`)."""
    pidfds = [child.pidfd for child in children]
    ready, *_ = select.select([*pidfds, *files], [], [], timeout_s)
    return [fd for fd in ready if fd in files]


def stop_all(children: Sequence[ChildProcess], grace_s: float = 5.0) -> None:
    """Send TERM to every group, KILL to what is left after `grace_s`, orphans of the dead too."""
    for child in children:
        child.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(child.signal_group(0) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        for child in children:
            child.exit_code  # noqa: B018  (reaps it)
    for child in children:
        child.signal_group(signal.SIGKILL)
    for child in children:
        if child.process is not None:
            child.process.wait()
            if child.pidfd >= 0:
                os.close(child.pidfd)
                child.pidfd = -1
