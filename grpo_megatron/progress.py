"""What each process of a run is doing, in a file of the run directory that its heartbeat rewrites.

    main thread       enter("train", "step 12") ... advance() ...      only sets numbers in memory
    heartbeat thread  writes them every `BEAT_S`, soon after a phase began   progress/trainer-0.json

So a process that is stopped or starved stops beating, one whose main thread is stuck beats without
progress, and a file system that stalls delays no work. `launch.watch` reads the files."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path

BEAT_S = 5.0
"""Seconds between two heartbeats."""
_SHORTEST_S = 1.0  # between two writes, however fast phases change
_LONGEST_DETAIL = 200
SERVING = "serving"
"""The phase of a rollout server that has answered once; an answer is progress."""
STACK_SIGNAL = signal.SIGUSR2
"""Has a Python role write the stacks of its threads to its log; nobody else uses it."""


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """What a role has written of itself. Seconds are by its own clock, so that the clocks of nodes
    need not agree."""

    role: str
    pid: int
    host: str
    beat: int
    """Counts the writes: it moves as long as the process is scheduled."""
    written_at: float
    """`time.time()` of the write, which may jump: for who has no other clock."""
    phase: str
    """What it is in: a word, under which durations are compared."""
    detail: str
    """Which step, request or file."""
    is_waiting: bool
    """Whether it waits for something to do, as long as it takes."""
    idle_s: float
    """Seconds since it made progress, or entered the phase."""
    longest_s: Mapping[str, float] = field(default_factory=dict)
    """By phase, the longest time without progress of those that ended."""
    write_s: float = 0.0
    """Seconds that the write before this one took."""
    trouble: str = ""
    """What it sees wrong with processes that it started; empty: nothing."""
    dumps_stacks: bool = False
    """Whether STACK_SIGNAL has it write its stacks to its log."""
    boot: str = ""
    """Which start of its node this is; empty: unknown."""
    up_s: float = 0.0
    """Seconds from that start to the write: a clock that all processes of the node share, and that
    nobody sets."""


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Which start of this node this is, as `ProgressRecord.boot`; empty where the kernel does not
    say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def up_seconds() -> float:
    """Return seconds since this node started, with those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_progress(path: Path) -> ProgressRecord | None:
    """Read what a role wrote last; None where it wrote nothing that can be read."""
    try:
        line = path.read_bytes().partition(b"\n")[0]
        values = json.loads(line)
        known = {entry.name for entry in fields(ProgressRecord)}
        return ProgressRecord(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


class Progress:
    """The progress of this process, under the name `role`, for the file `path`.

    examine: says what is wrong with processes that this one started; runs in the heartbeat."""

    def __init__(
        self,
        path: Path,
        role: str,
        *,
        examine: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = path
        self.role = role
        self._examine = examine
        self._clock = clock
        self._phase = "starting"
        self._detail = ""
        self._is_waiting = False
        self._moved_s = clock()
        self._gap_s = 0.0  # the longest of this phase so far
        self._longest_s: dict[str, float] = {}
        self._beats = 0
        self._write_s = 0.0
        self._dumps_stacks = False
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self, phase: str, detail: str = "", *, is_waiting: bool = False) -> None:
        """Begin a phase, which ends the one before."""
        self.advance()
        if not self._is_waiting:
            before = self._longest_s.get(self._phase, 0.0)
            self._longest_s[self._phase] = max(before, self._gap_s)
        self._gap_s = 0.0
        self._phase = phase
        self._detail = detail
        self._is_waiting = is_waiting
        self._wake.set()

    def advance(self) -> None:
        """Something of the phase is done."""
        now = self._clock()
        self._gap_s = max(self._gap_s, now - self._moved_s)
        self._moved_s = now

    def record(self) -> ProgressRecord:
        """Return what the next write says."""
        return ProgressRecord(
            role=self.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            beat=self._beats,
            written_at=round(time.time(), 3),
            phase=self._phase,
            detail=self._detail[:_LONGEST_DETAIL],
            is_waiting=self._is_waiting,
            idle_s=round(self._clock() - self._moved_s, 3),
            longest_s={name: round(longest, 3) for name, longest in self._longest_s.copy().items()},
            write_s=round(self._write_s, 3),
            trouble=self._examine(),
            dumps_stacks=self._dumps_stacks,
            boot=this_boot(),
            up_s=round(up_seconds(), 3),
        )

    def write(self) -> None:
        """Write the record in place: one line, of which a reader takes the first. A directory that
        has gone or a full disk is not this process's concern."""
        self._beats += 1
        line = json.dumps(asdict(self.record())).encode() + b"\n"
        began = self._clock()
        with contextlib.suppress(OSError):
            # opened each time: a network file system sends what was written when it is closed
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(file, line, 0)
            finally:
                os.close(file)
        self._write_s = self._clock() - began

    def start(self) -> None:
        """Write a first record, then beat until `close`. STACK_SIGNAL writes stacks to stderr."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):  # no stderr that is a file
            faulthandler.register(STACK_SIGNAL, all_threads=True)
            self._dumps_stacks = True
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat."""
        self._ended.set()
        self._wake.set()

    def _beat(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            self.write()
            if self._ended.wait(_SHORTEST_S):
                return
            self._wake.wait(BEAT_S - _SHORTEST_S)


_current: Progress | None = None


def start_progress(path: Path, role: str, *, examine: Callable[[], str] = lambda: "") -> Progress:
    """Begin to report this process as `role`, and have `enter`, `advance` and `within` do so."""
    global _current
    _current = Progress(path, role, examine=examine)
    _current.start()
    return _current


def enter(phase: str, detail: str = "", *, is_waiting: bool = False) -> None:
    """Call `Progress.enter` of this process; does nothing where it does not report."""
    if _current is not None:
        _current.enter(phase, detail, is_waiting=is_waiting)


def advance() -> None:
    """Call `Progress.advance` of this process; does nothing where it does not report."""
    if _current is not None:
        _current.advance()


@contextlib.contextmanager
def within(phase: str, detail: str = "") -> Iterator[None]:
    """Be in a phase within the block, then wait for something to do."""
    enter(phase, detail)
    try:
        yield
    finally:
        enter("waiting", is_waiting=True)
