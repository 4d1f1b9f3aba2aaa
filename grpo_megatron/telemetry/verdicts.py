"""Which metrics the screen shows (`screen.toml`), and whether they look ok or want watching.

The rules are rules of thumb to draw the eye, nothing stops a run because of them."""

import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_WINDOW, _BASELINE = 10, 50


class Row(NamedTuple):
    """A metric of the screen: the first of `names` that a step has. Without a rule neither good
    nor bad; else watched, or bad, where the rule's measure is above the limit."""

    label: str
    names: Sequence[str]
    rule: str | None = None
    watch: float = math.inf
    bad: float = math.inf
    plain: bool = False  # also in a plain line


ROWS = [Row(label, **fields) for label, fields in tomllib.loads(
    Path(__file__).with_name("screen.toml").read_text(encoding="utf-8")).items()]


def judge(row: Row, values: Sequence[float | None]) -> tuple[str, str]:
    """The verdict on a metric's values so far, oldest first, None where not finite: "ok", "watch"
    or "bad", and the reason in a few words where it is not ok."""
    if not values or row.rule is None:
        return "ok", ""
    if values[-1] is None:
        return "bad", "not finite"
    measure, reason = _RULES[row.rule]
    value = measure([value for value in values if value is not None])
    for level, limit in (("bad", row.bad), ("watch", row.watch)):
        if value > limit:
            return level, reason.format(abs(value), limit)
    return "ok", ""


def _over_median(values: Sequence[float]) -> float:
    before = values[-1 - _BASELINE:-1]
    median = statistics.median(before) if len(before) >= _WINDOW else 0.0
    return values[-1] / median if median > 0 else math.nan


def _moving_means(values: Sequence[float]) -> list[float]:
    return [sum(values[end - _WINDOW:end]) / _WINDOW for end in range(_WINDOW, len(values) + 1)]


def _share_lost(values: Sequence[float]) -> float:
    means = _moving_means(values)
    span = max(means) - min(means) if len(means) > _WINDOW else 0.0
    return (max(means) - means[-1]) / span if span > 0 else math.nan


def _share_left(values: Sequence[float]) -> float:
    means = _moving_means(values)
    return means[-1] / means[0] if len(means) > _WINDOW and means[0] > 0 else math.nan


_RULES: dict[str, tuple[Callable[[Sequence[float]], float], str]] = {
    "above": (lambda values: values[-1], "above {1:g}"),
    "jumped": (_over_median, "{0:.1f}x its median"),
    "dropped": (lambda values: -_over_median(values), "{0:.0%} of its median"),
    "fallen": (_share_lost, "{0:.0%} of its range below its best"),
    "collapsed": (lambda values: -_share_left(values), "{0:.0%} of its start")}
"""A measure, of which NaN is ok, and the format of (|measure|, limit); see `screen.toml`."""
