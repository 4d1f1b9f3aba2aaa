"""The watch over hangs: which role makes no progress, as far as its progress file says.

    no new heartbeat for `watch.silent_s`                 silent: stopped, starved, cannot write
    heartbeats, but no progress within the phase's limit  stuck
    heartbeats that tell of a stopped process below it    trouble

A role is named once, and once more when it goes on. Time counts only while this side itself could
read and write the run directory, so a file system that stalls makes no role look hung."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.watch import WatchConfig
from grpo_megatron.progress import SERVING, ProgressRecord

SHORTEST_LIMIT_S = 60.0
"""No phase is too long before this."""

Cause = Literal["silent", "stuck", "trouble"]


def expected_s(config: RunConfig, role: str, phase: str) -> float:
    """Return how long a phase of a role may make no progress where none like it has ended before,
    by the time-outs of the recipe."""
    rollout = config.rollout
    requests_s = rollout.request_timeout_s * rollout.max_attempts
    if role.startswith("trainer"):
        return config.trainer.command_timeout_s
    if role.startswith("rollout"):
        if phase == SERVING:
            return SHORTEST_LIMIT_S
        return rollout.startup_timeout_s
    if role.startswith("environment"):
        if phase == SERVING:
            return SHORTEST_LIMIT_S
        return rollout.startup_timeout_s
    if role.startswith("worker"):
        return max(rollout.startup_timeout_s, requests_s)
    return max(config.trainer.command_timeout_s, rollout.startup_timeout_s, requests_s)


def shortest_limit_s(config: RunConfig, role: str, phase: str) -> float:
    """Return how long a phase may always make no progress: a minute, and in rewards what the recipe
    gives to one, of which a coroutine may take twice."""
    if role == "controller" and phase == "reward":
        return SHORTEST_LIMIT_S + 2 * config.data.reward_timeout_s
    return SHORTEST_LIMIT_S


def phase_limit_s(
    record: ProgressRecord,
    slow_factor: float,
    expected: float,
    shortest: float = SHORTEST_LIMIT_S,
) -> float:
    """Return how long the phase of `record` may make no progress until its role is named."""
    limit = expected
    if record.phase in record.longest_s:
        limit = slow_factor * record.longest_s[record.phase]
    return max(shortest, limit)


@dataclass(frozen=True, slots=True)
class Hang:
    """A role that makes no progress."""

    role: str
    cause: Cause
    seconds: float
    """Without a heartbeat, or without progress."""
    record: ProgressRecord | None
    """The last that the role has written; None: nothing yet."""


class RoleWatch:
    """One role over time.

    Attributes:
        record: What it wrote last.
        silent_s: Seconds without a new heartbeat, of those that were counted."""

    def __init__(
        self,
        role: str,
        settings: WatchConfig,
        expected: Callable[[str], float],
        shortest: Callable[[str], float] = lambda phase: SHORTEST_LIMIT_S,
    ):
        self.role = role
        self.record: ProgressRecord | None = None
        self.silent_s = 0.0
        self._trouble_s = 0.0
        self._settings = settings
        self._expected = expected
        self._shortest = shortest

    def update(
        self, record: ProgressRecord | None, passed_s: float, *, is_stopped: bool = False
    ) -> Hang | None:
        """Take in what the role has written by now; the hang, if it is one.

        passed_s: since the last update. is_stopped: what is known of the process itself."""
        if record is not None and not self._is_old(record):
            self.silent_s = 0.0
            self.record = record
        else:
            self.silent_s += passed_s
        if self.record is not None and self.record.trouble:
            self._trouble_s += passed_s
        else:
            self._trouble_s = 0.0
        return self._hang(is_stopped)

    @property
    def is_working(self) -> bool:
        """Whether others may wait for the role: it does something, or it starts and has not said
        anything yet."""
        record = self.record
        if record is None:
            return True
        return not record.is_waiting and record.phase != SERVING

    def _is_old(self, record: ProgressRecord) -> bool:
        known = self.record
        return known is not None and (known.pid, known.beat) == (record.pid, record.beat)

    def _hang(self, is_stopped: bool) -> Hang | None:
        record = self.record
        silent_limit = self._settings.silent_s
        if record is None and not is_stopped:  # it imports, or waits for its step to start
            silent_limit = max(SHORTEST_LIMIT_S, self._expected("starting"))
        if self.silent_s >= silent_limit:
            return Hang(self.role, "silent", self.silent_s, record)
        if record is None:
            return None
        if self._trouble_s >= self._settings.silent_s:
            return Hang(self.role, "trouble", self._trouble_s, record)
        if record.is_waiting:
            return None
        limit = phase_limit_s(
            record,
            self._settings.slow_factor,
            self._expected(record.phase),
            self._shortest(record.phase),
        )
        if record.idle_s >= limit:
            return Hang(self.role, "stuck", record.idle_s, record)
        return None


def without_waiting_controller(hangs: Mapping[str, Hang]) -> dict[str, Hang]:
    """Leave out a controller that makes no progress, where others work or are about to start, each
    within a limit of its own, or have just done so: it waits for them."""
    found = dict(hangs)
    if "controller" in found and found["controller"].cause == "stuck":
        del found["controller"]
    return found


def culprits(hangs: Mapping[str, Hang]) -> dict[str, Hang]:
    """Leave out roles that only wait for another one that hangs: who is stuck where another is
    silent, and the controller where anyone else is stuck."""
    if any(hang.cause != "stuck" for hang in hangs.values()):
        return {role: hang for role, hang in hangs.items() if hang.cause != "stuck"}
    if len(hangs) > 1:
        return {role: hang for role, hang in hangs.items() if role != "controller"}
    return dict(hangs)
