"""metrics.jsonl: one line a step, the truth that screens and mirrors copy."""

import contextlib
import io
import json
import logging
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from grpo_megatron.errors import DataError
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir

logger = logging.getLogger(__name__)

NORMALISERS = {
    "reward/": "samples",
    "response/": "samples",
    "prompt/": "groups",
    "group/": "groups",
    "accuracy/": "groups",
    "advantage/": "samples",
    "environment/": "episodes",
    "experience/": "step",
    "prefix_cache/": "tokens",
    "data/": "run",
    "time/": "step",
    "idle/": "step",
    "throughput/": "second",
}
"""What metrics are normalised by whose origin does not say so, by the start of their names."""
NONFINITE = "telemetry/nonfinite/count"  # of a step's values, written only if there are any
_ADDED = ("step", "time_s", NONFINITE)  # to a step's metrics, by the writer


class MetricsWriter:
    """Appends to metrics.jsonl; a killed process loses at most the line it was writing.

    A line is `{"step": 7, "time_s": 1764000000.1, "reward/mean": 0.5, ...}`. Opening repairs a torn
    last line. Values that are not finite are counted in `nonfinite` and become null, with a warning
    once per name. `last_step` is the step of the last line, or None. A run that goes on knows what
    earlier lines have, and what that is normalised by."""

    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self.nonfinite: Counter[str] = Counter()
        self._names: set[str] = set()  # of all lines
        self._normalisers = _kept_normalisers(run_dir.metrics_normalisers)
        self.last_step: int | None = None
        self._file = self._opened(math.inf)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Append one step; returns exactly what was written, for the mirrors."""
        if self.last_step is not None and step <= self.last_step:
            raise DataError(
                f"step {step} after step {self.last_step}",
                where=str(self._run_dir.metrics),
                remedy="call truncate_after with the step to resume from",
            )
        record: dict[str, Any] = {"step": int(step), "time_s": round(time.time(), 3)}
        num_nonfinite = 0
        for name, value in metrics.items():
            record[name] = _number(value)
            if record[name] is not None:
                continue
            num_nonfinite += 1
            if name not in self.nonfinite:
                logger.warning("metric %s is %s in step %d; written as null", name, value, step)
            self.nonfinite[name] += 1
        if num_nonfinite:
            record[NONFINITE] = num_nonfinite
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._names.update(metrics)
        self.last_step = int(step)
        return record

    def write_normalisers(self, known: Mapping[str, str]) -> None:
        """Keep beside the file what each metric is a mean over (tokens, samples, groups, updates),
        or that it is a sum or a maximum. Rewritten when names are new."""
        found = {}
        for name in sorted(self._names):
            default = _default_normaliser(name)
            found[name] = known.get(name, self._normalisers.get(name, default))
        if found != self._normalisers:
            self._normalisers = found
            write_atomically(self._run_dir.metrics_normalisers, json.dumps(found, indent=1))

    def truncate_after(self, step: int) -> None:
        """Remove the lines after `step`, atomically: a run resumes from its checkpoint."""
        self._file.close()
        self._file = self._opened(step)

    def close(self) -> None:
        """Close the file; the writer is of no use afterwards."""
        self._file.close()

    def _opened(self, last: float) -> TextIO:
        """Open the file without a torn line and without the lines after step `last`; sets
        `last_step` and the names of the lines that are kept."""
        path = self._run_dir.metrics
        old = ""
        if path.exists():
            old = _text(path)
        new = ""
        self.last_step = None
        self._names.clear()
        for line, record in _complete(old, path):
            if record["step"] <= last:
                new += line
                self._names.update(record)
                self.last_step = record["step"]
        self._names.difference_update(_ADDED)
        if new != old:
            write_atomically(path, new)
        return path.open("a", encoding="utf-8", buffering=1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every complete line of a metrics.jsonl, in order; a torn last line is left out. Raises
    DataError where there is no such file, a line before the last is not JSON, or steps do not
    ascend."""
    if not path.is_file():
        raise DataError(
            "no metrics there", where=str(path), remedy="give the metrics.jsonl of a run directory"
        )
    return [record for _, record in _complete(_text(path), path)]


def metrics_so_far(path: Path) -> list[dict[str, Any]]:
    """Read as `read_metrics`; [] where no step has been written yet. Raises DataError also where a
    file has content, but not one step."""
    if not path.is_file():
        return []
    steps = read_metrics(path)
    if not steps and path.stat().st_size:
        raise DataError(
            f"nothing in {path.name} is a step's record", where=str(path), remedy="remove the file"
        )
    return steps


class ReadableMetrics(NamedTuple):
    """What can be read of a damaged metrics.jsonl.

    Attributes:
        steps: Records, by ascending step.
        problems: Of each line that is left out, why: "line 3 is no metrics record"."""

    steps: list[dict[str, Any]]
    problems: list[str]


def readable_metrics(path: Path) -> ReadableMetrics:
    """Read what can be read of a metrics.jsonl, for a person to look at: what decides by it takes
    `read_metrics`, which raises. No steps where none has been written yet.

    A last line without its end may be being written, and is left out without a word. Where steps do
    not ascend, as few lines as possible are left out: one wrong number does not hide the lines
    behind it."""
    if not path.is_file():
        return ReadableMetrics([], [])
    content = _text(path)
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    problems = {}  # by the number of the line
    for number, line in enumerate(_lines(content), start=1):
        record = _record_in(line)
        if record is not None:
            numbers.append(number)
            records.append(record)
        elif line.endswith("\n"):
            problems[number] = f"line {number} is no metrics record"
    kept = _longest_ascending([record["step"] for record in records])
    for place in sorted(set(range(len(records))).difference(kept)):
        number = numbers[place]
        step = records[place]["step"]
        problems[number] = f"line {number}, of step {step}, is out of order"
    if content and not records and not problems:
        problems[1] = f"nothing in {path.name} is a step's record"
    return ReadableMetrics(
        [records[place] for place in kept], [problems[number] for number in sorted(problems)]
    )


def in_short(problems: Sequence[str]) -> str:
    """Join the first three, and say how many more there are."""
    told = "; ".join(problems[:3])
    if len(problems) > 3:
        told += f"; {len(problems) - 3} more"
    return told


def _longest_ascending(steps: Sequence[int]) -> list[int]:
    """Return the places of as many steps as possible that ascend; of equal steps the last one."""
    ends: list[int] = []  # by length: where the sequence ends that can go on with the lowest step
    previous: list[int | None] = []
    for place, step in enumerate(steps):
        length = bisect_left(ends, step, key=lambda end: steps[end])
        before = None
        if length:
            before = ends[length - 1]
        previous.append(before)
        ends[length : length + 1] = [place]
    kept = []
    last = None
    if ends:
        last = ends[-1]
    while last is not None:
        kept.append(last)
        last = previous[last]
    kept.reverse()
    return kept


def _text(path: Path) -> str:
    """Read a file without a change to its ends of lines: a damaged byte may look like one."""
    return path.read_bytes().decode(errors="replace")


def _lines(content: str) -> list[str]:
    """Divide a text at line feeds alone, as editors number lines."""
    return io.StringIO(content, newline="\n").readlines()


def _complete(content: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield lines with their records, by ascending step; one that was being written when its
    process died is left out. Steps may be missing: what a machine wrote last is lost when it goes
    down, while its checkpoint is on the disk.

    Raises DataError for a line before the last that is no record, and for a step that stands behind
    itself or a later one."""
    lines = _lines(content)
    before = -1
    for number, line in enumerate(lines, start=1):
        record = _record_in(line)
        if record is None and number == len(lines):
            return
        where = f"{path}:{number}"
        if record is None:
            raise DataError("this line is no metrics record", where=where, remedy="remove the line")
        step = record["step"]
        if step <= before:
            raise DataError(
                f"this line is of step {step}, the one before it of step {before}",
                where=where,
                remedy="remove the line that is too much",
            )
        before = step
        yield line.rstrip("\r\n") + "\n", record


def _record_in(line: str) -> dict[str, Any] | None:
    """Return the record of a step, also of a line whose end is missing; None: it is not whole."""
    record = None
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    if type(step) is not int or step < 0:
        return None
    return record


def _kept_normalisers(path: Path) -> dict[str, str]:
    """Return what a run has written of its metrics; {} where that is not there, or damaged: they
    are then made again from the names."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return {name: str(unit) for name, unit in kept.items()}
    return {}


def _default_normaliser(name: str) -> str:
    for start, unit in NORMALISERS.items():
        if name.startswith(start):
            return unit
    return "step"


def _number(value: Any) -> int | float | None:
    """Return the value as JSON has it; None for what is not finite."""
    if isinstance(value, int):
        return int(value)  # of a bool
    if value is None or not math.isfinite(value):
        return None
    return float(value)
