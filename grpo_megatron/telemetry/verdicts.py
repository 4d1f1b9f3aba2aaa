"""The ten metrics that the screen shows, and simple rules that say ok, watch or bad.

The rules are rules of thumb to draw the eye, nothing stops a run because of them:

- above(watch, bad): the last value is over a fixed limit.
- fallen: the mean of the last 10 steps is below the best such mean by more than 15 % (watch) or
  40 % (bad) of the range that these means have covered. Needs 20 steps.
- collapsed: the mean of the last 10 steps is below 20 % (watch) or 5 % (bad) of the first 10's.
- jumped(watch, bad): the last value over the median of the 50 before it. Needs 10 steps.
- dropped(watch, bad): the last value under that median, as a fraction of it.

A value that is not finite is always bad.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Verdict(NamedTuple):
    """A level and, unless it is "ok", the reason in a few words."""

    level: str  # "ok", "watch" or "bad"
    reason: str = ""


OK = Verdict("ok")
Values = Sequence[float | None]
Rule = Callable[[Sequence[float]], Verdict]

_WINDOW = 10
_BASELINE = 50


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of the screen: the first of `names` that a step has."""

    label: str
    names: tuple[str, ...]
    rule: Rule


def judge(row: Row, values: Values) -> Verdict:
    """The verdict on a metric's values so far, oldest first, None where not finite."""
    if not values:
        return OK
    if values[-1] is None:
        return Verdict("bad", "not finite")
    return row.rule([value for value in values if value is not None])


def always_ok(values: Sequence[float]) -> Verdict:
    """For metrics that are neither good nor bad."""
    return OK


def above(watch: float, bad: float) -> Rule:
    """Over a fixed limit."""
    def rule(values: Sequence[float]) -> Verdict:
        return _graded(values[-1], watch, bad, lambda limit: f"above {limit:g}")
    return rule


def fallen(values: Sequence[float]) -> Verdict:
    """Lost a good part of what had been gained."""
    means = _moving_means(values)
    if len(means) <= _WINDOW or (span := max(means) - min(means)) <= 0:
        return OK
    lost = (max(means) - means[-1]) / span
    return _graded(lost, 0.15, 0.40, lambda limit: f"{lost:.0%} of its range below its best")


def collapsed(values: Sequence[float]) -> Verdict:
    """Only a small part of what it was at the start."""
    means = _moving_means(values)
    if len(means) <= _WINDOW or means[0] <= 0:
        return OK
    left = means[-1] / means[0]
    return _graded(-left, -0.20, -0.05, lambda limit: f"{left:.0%} of its start")


def jumped(watch: float, bad: float) -> Rule:
    """Far over its recent median."""
    def rule(values: Sequence[float]) -> Verdict:
        return _against_median(values, lambda ratio: _graded(
            ratio, watch, bad, lambda limit: f"{ratio:.1f}x its median"))
    return rule


def dropped(watch: float, bad: float) -> Rule:
    """Far under its recent median."""
    def rule(values: Sequence[float]) -> Verdict:
        return _against_median(values, lambda ratio: _graded(
            -ratio, -watch, -bad, lambda limit: f"{ratio:.0%} of its median"))
    return rule


def _against_median(values: Sequence[float], grade: Callable[[float], Verdict]) -> Verdict:
    before = values[-1 - _BASELINE:-1]
    if len(before) < _WINDOW or (median := statistics.median(before)) <= 0:
        return OK
    return grade(values[-1] / median)


def _graded(value: float, watch: float, bad: float, reason: Callable[[float], str]) -> Verdict:
    if value > bad:
        return Verdict("bad", reason(bad))
    return Verdict("watch", reason(watch)) if value > watch else OK


def _moving_means(values: Sequence[float]) -> list[float]:
    return [sum(values[end - _WINDOW:end]) / _WINDOW
            for end in range(_WINDOW, len(values) + 1)]


ROWS = (
    Row("reward", ("reward/mean",), fallen),
    Row("accuracy", ("evaluation/accuracy", "reward/accuracy"), fallen),
    Row("groups without signal", ("group/all_equal_fraction",), above(0.5, 0.9)),
    Row("entropy", ("policy/entropy",), collapsed),
    Row("kl engine-trainer", ("mismatch/k3",), above(1e-3, 1e-2)),
    Row("clipped", ("clip/high_fraction", "clip/fraction"), above(0.5, 0.9)),
    Row("grad norm", ("grad/norm",), jumped(5.0, 20.0)),
    Row("length", ("response/length_mean",), always_ok),
    Row("truncated", ("response/truncated_fraction",), above(0.1, 0.3)),
    Row("tokens/s", ("throughput/rollout_tokens_per_s",), dropped(0.7, 0.3)),
    Row("seconds", ("time/step_s",), jumped(1.5, 3.0)),
)
"""Sequence-level objectives clip 10 to 30 % by design (GSPO, arXiv:2507.18071)."""

PLAIN_LABELS = ("reward", "accuracy", "entropy", "kl engine-trainer", "grad norm", "tokens/s",
                "seconds")
"""The rows of a plain line."""
