"""How long a run has taken, over all of its attempts."""

import json
import time
from pathlib import Path

from grpo_megatron.rundir import RunDir


class RunClock:
    """Wall time of a run.

    started: `time.monotonic()` when this attempt began. earlier: seconds of the attempts before."""

    def __init__(self, started: float, earlier: float = 0.0):
        self._started = started
        self._earlier = earlier

    @property
    def seconds(self) -> float:
        """Of all attempts, until now."""
        return self._earlier + time.monotonic() - self._started

    def count_earlier(self, seconds: float) -> None:
        """Count `seconds` of earlier attempts, unless more of them are known."""
        self._earlier = max(self._earlier, seconds)


def seconds_at_end(run_dir: RunDir) -> float:
    """Return the seconds that a run had taken when it last ended; 0 where it has not, or its result
    cannot be read."""
    return max(_seconds_of(run_dir.result), _seconds_of(run_dir.earlier_result))


def _seconds_of(result: Path) -> float:
    try:
        return float(json.loads(result.read_bytes())["seconds"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0.0
