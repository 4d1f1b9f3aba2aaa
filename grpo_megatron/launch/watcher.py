"""Watches the roles of a run from a thread: the supervisor must not wait for files itself."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.look import STOPPED_STATES, Look, process_state
from grpo_megatron.launch.watch import (
    SHORTEST_LIMIT_S,
    Hang,
    RoleWatch,
    culprits,
    expected_s,
    shortest_limit_s,
    without_waiting_controller,
)
from grpo_megatron.progress import Progress, ProgressRecord, read_progress
from grpo_megatron.rundir import RunDir

PERIOD_S = 2.5
"""Seconds between two looks at all files."""
_STALLED_S = 10.0
"""A round of reading and writing that takes longer says nothing about the roles."""
_LOOK_AGAIN_S = 20.0  # at a role that starts
_LEFT_TO_CONTROLLER_S = SHORTEST_LIMIT_S / 2  # to go on with what others have done
_MOST_LOOKS = 8  # at processes that hang at once; others hang for the same reason
_STACK_LINES = 12  # of a stack, in a message


class Looker(Protocol):
    """Looks at a process, wherever it runs."""

    def __call__(self, record: ProgressRecord, log: Path, probe: Path) -> Look | None:
        """None where that does not succeed."""
        ...


@dataclass(frozen=True, slots=True)
class News:
    """What the supervisor is to report: a role that hangs or goes on, or files that stall."""

    kind: Literal["hung", "recovered", "files"]
    text: str
    role: str = ""
    phase: str = ""
    detail: str = ""
    seconds: float = 0.0
    cause: str = ""
    """Of a hang: stopped, silent, files, stuck, trouble."""
    stack: str = ""
    """Path of the file with its stack, if any."""


@dataclass(slots=True)
class _Named:
    """A hang that was told."""

    watch: RoleWatch
    """Of the process that hangs: another one may run under the role's name later."""
    at_s: float
    cause: str


class Watcher:
    """Looks at the progress files of `roles` until closed; `pids` are those of this machine.

    look: how a process that hangs is looked at. May raise nothing.

    Attributes:
        awaits_start: A process that died will be started again, after a pause in which no role is
            there for it."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        roles: Mapping[str, int | None],
        look: Looker,
    ):
        self.awaits_start = False
        self._config = config
        self._run_dir = run_dir
        self._look = look
        self._watches: dict[str, RoleWatch] = {}
        self._pids: dict[str, int | None] = {}
        for role, pid in roles.items():
            self.begin(role, pid)
        self._others_rest_s = 0.0  # since a role that is not the controller has worked
        self._named: dict[str, _Named] = {}
        self._looks_again_s: dict[str, float] = {}
        self._news: queue.SimpleQueue[tuple[RoleWatch | None, News]] = queue.SimpleQueue()
        self._own = Progress(run_dir.role_progress("supervisor"), "supervisor")
        self._own.enter("watching")
        self._round_began_s = time.monotonic()
        self._is_round = False
        self._told_files = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """End; what waits for a file is not waited for."""
        self._closed.set()
        self._thread.join(timeout=1.0)

    def begin(self, role: str, pid: int | None) -> None:
        """Watch a role, which starts now."""
        self._pids[role] = pid
        self._watches[role] = RoleWatch(
            role,
            self._config.watch,
            partial(expected_s, self._config, role),
            partial(shortest_limit_s, self._config, role),
        )

    def forget(self, role: str) -> None:
        """Watch a role no more: it has ended."""
        self._watches.pop(role, None)
        self._named.pop(role, None)

    def take_news(self) -> list[News]:
        """Return what there is to report since the last call, without processes that have ended
        meanwhile."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                watch, news = self._news.get_nowait()
                if watch is None or self._is_present(watch):
                    found.append(news)
        waits_s = time.monotonic() - self._round_began_s
        if self._is_round and waits_s > 3 * _STALLED_S and not self._told_files:
            self._told_files = True
            found.append(News("files", self._files_text(f"does not answer since {waits_s:.0f} s")))
        return found

    def overdue(self) -> dict[str, float]:
        """Roles that were named as hung and still are, with the seconds since; not those that only
        seem to wait for their files."""
        now = time.monotonic()
        found = {}
        for role, named in self._named.copy().items():
            if named.cause != "files" and self._is_present(named.watch):
                found[role] = now - named.at_s
        return found

    def cause_of(self, role: str) -> str:
        """Why a role was named; empty: it was not."""
        named = self._named.get(role)
        if named is None or not self._is_present(named.watch):
            return ""
        return named.cause

    def _is_named(self, watch: RoleWatch) -> bool:
        named = self._named.get(watch.role)
        return named is not None and named.watch is watch

    def _is_present(self, watch: RoleWatch) -> bool:
        """False where its process was forgotten: the thread may be at work on it all the same."""
        return self._watches.get(watch.role) is watch

    # --- in the thread

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._closed.wait(PERIOD_S):
            now = time.monotonic()
            # never more than two periods: this side may have been stopped itself
            passed_s = min(now - last_s, 2 * PERIOD_S)
            last_s = now
            self.look_once(passed_s)

    def look_once(self, passed_s: float) -> None:
        """Read all files and note what has changed; `passed_s` since the last time."""
        self._round_began_s = time.monotonic()
        self._is_round = True
        self._own.advance()
        self._own.write()
        watches = self._watches.copy()
        records = {role: read_progress(self._run_dir.role_progress(role)) for role in watches}
        self._is_round = False
        if self._stalls(time.monotonic() - self._round_began_s):
            passed_s = 0.0
        hangs = self._hangs(watches, records, passed_s)
        self._report_recovered(hangs)
        self._report_new(watches, culprits(hangs))

    def _stalls(self, took_s: float) -> bool:
        """Whether reading took so long that the file system stalls; tell its begin and its end."""
        is_stalled = took_s > _STALLED_S
        if is_stalled and not self._told_files:
            self._report_files(f"took {took_s:.0f} s for a look")
        if self._told_files and not is_stalled:
            self._report_files("answers again")
        self._told_files = is_stalled
        return is_stalled

    def _hangs(
        self,
        watches: Mapping[str, RoleWatch],
        records: Mapping[str, ProgressRecord | None],
        passed_s: float,
    ) -> dict[str, Hang]:
        """Return who hangs, by role; a controller that only waits for others, or has a moment ago,
        is not among them."""
        hangs = {}
        for role, watch in watches.items():
            hang = watch.update(records[role], passed_s, is_stopped=self._is_stopped(role))
            if hang is not None:
                hangs[role] = hang
        others = [watch for role, watch in watches.items() if role != "controller"]
        self._others_rest_s += passed_s
        if self.awaits_start or any(watch.is_working for watch in others):
            self._others_rest_s = 0.0
        if self._others_rest_s < _LEFT_TO_CONTROLLER_S:
            return without_waiting_controller(hangs)
        return hangs

    def _report_new(self, watches: Mapping[str, RoleWatch], hangs: Mapping[str, Hang]) -> None:
        """Tell hangs that were not told before: a look at the process of each of the first few, at
        once, and the others without."""
        now = time.monotonic()
        new: list[tuple[RoleWatch, Hang]] = []
        for role, hang in hangs.items():
            may_be_looked_at = self._looks_again_s.get(role, 0.0) <= now
            if may_be_looked_at and not self._is_named(watches[role]):
                new.append((watches[role], hang))
        looks = []
        with ThreadPoolExecutor(_MOST_LOOKS) as looking:  # which starts threads for looks alone
            for watch, hang in new[:_MOST_LOOKS]:
                looks.append(looking.submit(self._report_hung, watch, hang))
        for look in looks:
            look.result()  # which raises what a look did
        for watch, hang in new[_MOST_LOOKS:]:
            self._report_hung(watch, hang, look=False)

    def _is_stopped(self, role: str) -> bool:
        pid = self._pids.get(role)
        return pid is not None and process_state(pid) in STOPPED_STATES

    def _report_recovered(self, hangs: Mapping[str, Hang]) -> None:
        for role, named in self._named.copy().items():
            if role in hangs:
                continue
            seconds = time.monotonic() - named.at_s
            self._named.pop(role, None)
            text = f"{role} goes on, {seconds:.0f} s after it was named"
            self._news.put((named.watch, News("recovered", text, role, seconds=round(seconds, 1))))

    def _report_files(self, what: str) -> None:
        self._news.put((None, News("files", self._files_text(what))))

    def _report_hung(self, watch: RoleWatch, hang: Hang, *, look: bool = True) -> None:
        role = hang.role
        log = self._run_dir.logs / f"{role}.log"
        record = hang.record
        if record is None:
            record = _unwritten_record(role, self._pids.get(role))
        found = None
        if look:
            found = self._look(record, log, self._run_dir.role_progress(f".probe-{role}"))
        if self._only_starts(hang, found):
            self._looks_again_s[role] = time.monotonic() + _LOOK_AGAIN_S
            return
        news = describe_hang(hang, found, _last_line(log))
        if found is not None and found.stack:
            file = self._run_dir.logs / f"hung-{role}.txt"
            with contextlib.suppress(OSError):
                file.write_text(found.stack + "\n")
                news = _with_stack(news, found.stack, file)
        self._named[role] = _Named(watch, time.monotonic(), news.cause)
        self._news.put((watch, news))

    def _only_starts(self, hang: Hang, look: Look | None) -> bool:
        """Whether a silent role may be reading libraries, which keeps its heartbeat from running,
        within the time that the recipe gives to a start."""
        record = hang.record
        if hang.cause != "silent" or record is None or record.phase != "starting":
            return False
        if look is None or look.is_stopped or not look.state:
            return False
        return hang.seconds < expected_s(self._config, hang.role, "starting")

    def _files_text(self, what: str) -> str:
        return (
            f"the file system of {self._run_dir.root} {what}: hangs of processes cannot be told "
            "from that while it lasts"
        )


def describe_hang(hang: Hang, look: Look | None, last_line: str) -> News:
    """Say which role hangs in what, for how long, why as far as it is known, and its last line."""
    record = hang.record
    phase = "starting"
    detail = ""
    if record is not None:
        phase = record.phase
        detail = record.detail
    cause: str = hang.cause
    role = f"{hang.role}, in {phase} {detail}".rstrip()
    if hang.cause == "stuck":
        what = f"runs, but has made no progress for {hang.seconds:.0f} s"
    elif hang.cause == "trouble":
        assert record is not None  # it told the trouble
        what = f"says for {hang.seconds:.0f} s that {record.trouble}"
    else:
        what = f"has given no sign of life for {hang.seconds:.0f} s"
        cause, why = _why_silent(look)
        what += f": {why}"
    text = f"{role}, {what}"
    if last_line:
        text += f"; its last line: {last_line}"
    return News("hung", text, hang.role, phase, detail, round(hang.seconds, 1), cause)


def _why_silent(look: Look | None) -> tuple[str, str]:
    if look is None:
        return "silent", "its node could not be asked why"
    if look.is_stopped:
        return "stopped", "it is stopped (SIGSTOP, or a debugger)"
    if not look.state:
        return "silent", "there is no such process on its node any more"
    if look.is_held_by_files:
        return "files", (
            f"the process is not stopped (state {look.state}), it waits for the file system; "
            "whether its work goes on is not known"
        )
    return "silent", (
        f"it is not stopped (state {look.state}), but its heartbeat does not run: a native call "
        "that keeps the interpreter, or a node without free cores"
    )


def _with_stack(news: News, stack: str, file: Path) -> News:
    lines = stack.splitlines()
    shown = [f"    {news.role}| {line}" for line in lines[:_STACK_LINES]]
    if len(lines) > _STACK_LINES:
        shown.append(f"    {news.role}| … {len(lines) - _STACK_LINES} lines more in {file}")
    return replace(news, text="\n".join([news.text, *shown]), stack=str(file))


def _unwritten_record(role: str, pid: int | None) -> ProgressRecord:
    """Return the record of a role that has not written one yet."""
    return ProgressRecord(role, pid or 0, "", 0, 0.0, "starting", "", False, 0.0)


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, at most 200 characters."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        for line in reversed(file.read().decode(errors="replace").splitlines()):
            if line.strip():
                return line.strip()[:200]
    return ""
