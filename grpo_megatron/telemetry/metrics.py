"""metrics.jsonl: one line a step, the truth that screens and mirrors copy."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir

logger = logging.getLogger(__name__)

NORMALISERS = {"reward/": "samples", "response/": "samples", "prompt/": "groups",
               "group/": "groups", "accuracy/": "groups", "advantage/": "samples",
               "time/": "step", "throughput/": "second"}
"""What metrics are normalised by whose origin does not say so, by the start of their names."""
NONFINITE = "telemetry/nonfinite/count"
"""Metric of a step's line: how many of its values were not finite, written only if there are."""


class MetricsWriter:
    """Appends to metrics.jsonl; a killed process loses at most the line it was writing.

    A line is `{"step": 7, "time_s": 1764000000.1, "reward/mean": 0.5, ...}`, names being flat
    `area/name/stat`. Opening repairs a torn last line. Values that are not finite become null,
    with a warning once per name.

    Attributes:
        last_step: Step of the last line; None while there is none.
        nonfinite: How often each name was not finite, since this writer was made.

    Raises:
        DataError: A line in the middle of an existing file is not JSON.
    """

    def __init__(self, run_dir: RunDir):
        self._path = run_dir.metrics
        self.nonfinite: Counter[str] = Counter()
        self.last_step: int | None = None
        self._names: set[str] = set()
        self._normalisers: dict[str, str] = {}
        self._keep(lambda step: True)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Append one step; returns exactly what was written, for the mirrors.

        Raises:
            DataError: The file already has this step or a later one.
            TypeError: A value is not a number.
        """
        if self.last_step is not None and step <= self.last_step:
            raise DataError(f"step {step} after step {self.last_step}", where=str(self._path),
                            remedy="call truncate_after with the step that a run resumes from")
        record: dict[str, Any] = {"step": int(step), "time_s": round(time.time(), 3)}
        bad = 0
        for name, value in metrics.items():
            number = _number(name, value)
            if number is None:
                bad += 1
                self.nonfinite[name] += 1
                if self.nonfinite[name] == 1:
                    logger.warning("metric %s is %s in step %d; written as null", name, value,
                                   step)
            record[name] = number
        if bad:
            record[NONFINITE] = bad
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._names.update(metrics)
        self.last_step = int(step)
        return record

    def write_normalisers(self, known: Mapping[str, str]) -> None:
        """Keep beside the file what each metric is a mean over (tokens, samples, groups, updates),
        or that it is a sum or a maximum: metrics_normalisers.json. Rewritten when names are new.
        """
        found = {name: next((unit for start, unit in NORMALISERS.items()
                             if name.startswith(start)), "step") for name in sorted(self._names)}
        found |= {n: unit for n, unit in {**self._normalisers, **known}.items() if n in found}
        if found != self._normalisers:
            self._normalisers = found
            partial = self._path.with_name(".metrics_normalisers.partial")
            partial.write_text(json.dumps(found, indent=1))
            partial.replace(self._path.with_name("metrics_normalisers.json"))

    def truncate_after(self, step: int) -> None:
        """Remove the lines after `step`, atomically: a run resumes from its checkpoint."""
        self._file.close()
        self._keep(lambda found: found <= step)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        """Close the file (idempotent)."""
        self._file.close()

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        """Rewrite the file with the wanted complete lines, if that changes it."""
        old = self._path.read_bytes() if self._path.exists() else b""
        lines = [line for line, record in _complete(old, self._path) if wanted(record["step"])]
        new = b"".join(lines)
        if new != old:
            partial = self._path.with_name(f".{self._path.name}.partial")
            with partial.open("wb") as file:
                file.write(new)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        self.last_step = json.loads(lines[-1])["step"] if lines else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics.jsonl, in order; a torn last line is left out.

    Raises:
        DataError: There is no such file, or a line before the last is not JSON.
    """
    if not path.is_file():
        raise DataError("no metrics there", where=str(path),
                        remedy="give the metrics.jsonl of a run directory")
    return [record for _, record in _complete(path.read_bytes(), path)]


def _complete(content: bytes, path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    lines = content.splitlines(keepends=True)
    found = []
    for number, line in enumerate(lines, start=1):
        record = _parsed(line)
        if record is not None:
            found.append((line, record))
        elif number < len(lines):
            raise DataError("this line is no metrics record", where=f"{path}:{number}",
                            remedy="remove the line")
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _number(name: str, value: Any) -> int | float | None:
    if name in ("step", "time_s"):
        raise TypeError(f"{name!r} is not a metric's name")
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError(f"metric {name} is text: {value!r}")
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
