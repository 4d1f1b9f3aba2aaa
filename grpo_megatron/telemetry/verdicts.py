"""The metrics that the screen shows, and simple rules that say ok, watch or bad.

The rules are rules of thumb to draw the eye, nothing stops a run because of them. A value that is
not finite is always bad.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Verdict(NamedTuple):
    """A level and, unless it is "ok", the reason in a few words."""

    level: str  # "ok", "watch" or "bad"
    reason: str = ""


OK = Verdict("ok")
_WINDOW, _BASELINE = 10, 50


@dataclass(frozen=True, slots=True)
class Rule:
    """Compares a measure of a metric's values with two limits; higher is worse, NaN is ok."""

    measure: Callable[[Sequence[float]], float]
    watch: float
    bad: float
    reason: str  # format of (|measure|, limit)

    def __call__(self, values: Sequence[float]) -> Verdict:
        value = self.measure(values)
        for level, limit in (("bad", self.bad), ("watch", self.watch)):
            if value > limit:
                return Verdict(level, self.reason.format(abs(value), limit))
        return OK


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of the screen: the first of `names` that a step has."""

    label: str
    names: tuple[str, ...]
    rule: Rule | None = None  # None: neither good nor bad


def judge(row: Row, values: Sequence[float | None]) -> Verdict:
    """The verdict on a metric's values so far, oldest first, None where not finite."""
    if not values or row.rule is None:
        return OK
    if values[-1] is None:
        return Verdict("bad", "not finite")
    return row.rule([value for value in values if value is not None])


def above(watch: float, bad: float) -> Rule:
    """The last value is over a fixed limit."""
    return Rule(lambda values: values[-1], watch, bad, "above {1:g}")


def jumped(watch: float, bad: float) -> Rule:
    """The last value over the median of the 50 before it. Needs 10 steps."""
    return Rule(_over_median, watch, bad, "{0:.1f}x its median")


def dropped(watch: float, bad: float) -> Rule:
    """The last value under that median, as a fraction of it."""
    return Rule(lambda values: -_over_median(values), -watch, -bad, "{0:.0%} of its median")


def _over_median(values: Sequence[float]) -> float:
    before = values[-1 - _BASELINE:-1]
    median = statistics.median(before) if len(before) >= _WINDOW else 0.0
    return values[-1] / median if median > 0 else math.nan


def _moving_means(values: Sequence[float]) -> list[float]:
    return [sum(values[end - _WINDOW:end]) / _WINDOW
            for end in range(_WINDOW, len(values) + 1)]


def _share_lost(values: Sequence[float]) -> float:
    means = _moving_means(values)
    span = max(means) - min(means) if len(means) > _WINDOW else 0.0
    return (max(means) - means[-1]) / span if span > 0 else math.nan


def _share_left(values: Sequence[float]) -> float:
    means = _moving_means(values)
    return means[-1] / means[0] if len(means) > _WINDOW and means[0] > 0 else math.nan


fallen = Rule(_share_lost, 0.15, 0.40, "{0:.0%} of its range below its best")
"""The mean of the last 10 steps is below the best such mean by more than this part of the range
that these means have covered. Needs 20 steps."""
collapsed = Rule(lambda values: -_share_left(values), -0.20, -0.05, "{0:.0%} of its start")
"""The mean of the last 10 steps is below this part of the first 10's."""

ROWS = (
    Row("reward", ("reward/mean",), fallen),
    Row("accuracy", ("evaluation/accuracy", "reward/accuracy"), fallen),
    Row("groups without signal", ("group/all_equal_fraction",), above(0.5, 0.9)),
    Row("entropy", ("policy/entropy",), collapsed),
    Row("kl engine-trainer", ("mismatch/k3",), above(1e-3, 1e-2)),
    Row("clipped", ("clip/high_fraction", "clip/fraction"), above(0.5, 0.9)),
    Row("grad norm", ("grad/norm",), jumped(5.0, 20.0)),
    Row("length", ("response/length_mean",)),
    Row("truncated", ("response/truncated_fraction",), above(0.1, 0.3)),
    Row("tokens/s", ("throughput/rollout_tokens_per_s",), dropped(0.7, 0.3)),
    Row("seconds", ("time/step_s",), jumped(1.5, 3.0)),
)
"""Sequence-level objectives clip 10 to 30 % by design (GSPO, arXiv:2507.18071)."""

PLAIN_LABELS = ("reward", "accuracy", "entropy", "kl engine-trainer", "grad norm", "tokens/s",
                "seconds")
"""The rows of a plain line."""
