"""How the episodes of a domain end, and when that is too often badly."""

import logging
from collections import Counter
from pathlib import Path

from grpo_megatron.environments.protocol import Step, Unscorable
from grpo_megatron.errors import EpisodeError

MAX_ENDS = 32
"""Processes that an environment may cost without an episode that ends well in between."""
MAX_SPOILT = 256
"""Episodes that it may spoil, each by itself, without one that ends well in between."""


_MOST_LOGGED = 50
logger = logging.getLogger(__name__)


class EpisodeLost(Unscorable):
    """The process of the episode has ended."""


class Failures:
    """How the episodes of a domain end, to stop a run whose environment never works."""

    def __init__(self, domain: str, name: str, log_path: Path, *, bounds_spoilt: bool = True):
        """name: as messages have it, `environment calculator`; bounds_spoilt: whether
        `MAX_SPOILT` holds, else episodes may be spoilt without end."""
        self._domain = domain
        self._name = name
        self._log_path = log_path
        self._bounds_spoilt = bounds_spoilt
        self._counts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._last = ""
        self._num_logged = 0

    @property
    def subject(self) -> str:
        """What fails, and where: `environment calculator of domain sums`."""
        return f"{self._name} of domain {self._domain}"

    @property
    def last(self) -> str:
        """The reason that was counted last; empty: there was none."""
        return self._last

    def finished(self) -> None:
        """An episode has ended well."""
        self._counts["episodes"] += 1
        self._in_a_row.clear()

    def add(self, kind: str, reason: str, *, is_lost: bool = False) -> None:
        """Count a process that ended ("ends") or an episode spoilt by itself ("spoilt"); is_lost:
        by the end of its process."""
        if is_lost:
            self.add_lost()
        else:
            self._counts[kind] += 1
        self._in_a_row[kind] += 1
        self._last = reason
        if kind == "spoilt":
            self._log(reason)

    def _log(self, reason: str) -> None:
        """Tell why an episode cannot be scored, of the first ones."""
        self._num_logged += 1
        if self._num_logged <= _MOST_LOGGED:
            logger.warning("%s: an episode cannot be scored: %s", self.subject, reason)
        if self._num_logged == _MOST_LOGGED:
            logger.warning("%s: further ones are only counted", self.subject)

    def add_lost(self) -> None:
        """Count an episode that was lost with its process."""
        self._counts["lost"] += 1

    def check(self) -> None:
        """EpisodeError where nothing but failures came, too often."""
        bounds = {"ends": MAX_ENDS}
        if self._bounds_spoilt:
            bounds["spoilt"] = MAX_SPOILT
        for kind, most in bounds.items():
            number = self._in_a_row[kind]
            if number < most:
                continue
            what = f"spoilt {number} episodes"
            if kind == "ends":
                what = f"cost {number} processes"
            raise EpisodeError(
                f"{self._name} {what} without one that ended well in between; the last: "
                f"{self._last}",
                where=f"[[domains]] {self._domain}; messages in {self._log_path}",
                remedy="correct it, or raise its time limit (step_s, of an agent episode_s) or "
                "memory_mib",
            )

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call."""
        metrics = {}
        for kind in ("episodes", "spoilt", "lost", "ends"):
            metrics[f"environment/{self._domain}/{kind}"] = float(self._counts.pop(kind, 0))
        return metrics


class EpisodeEnd:
    """Counts how one episode ends: by its last step, or, where a limit ends it in between, by its
    close."""

    def __init__(self, failures: Failures):
        self._failures = failures
        self._goes_on = False
        """Whether the last thing that the environment did was to reply."""

    def count(self, step: Step) -> None:
        """Count the episode if this step has ended it."""
        self._goes_on = not step.done and not step.spoilt
        if step.spoilt:
            self._failures.add("spoilt", "the environment says that the episode is spoilt")
        elif step.done:
            self._failures.finished()

    def failed(self) -> None:
        """The episode was counted as what the environment has failed in."""
        self._goes_on = False

    def close(self) -> None:
        """Count the episode as one that ended well if nothing has ended it and its environment has
        replied (idempotent)."""
        if self._goes_on:
            self._failures.finished()
        self._goes_on = False
