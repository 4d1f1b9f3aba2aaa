"""A reward that an untrained policy earns in part, so that short runs have gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def vowels(
    completion: str,
    answer: str,
    *,
    prompt: str,
    metadata: Mapping[str, Any],
    api_key: str | None = None,
) -> float:
    """Fraction of the characters that are vowels or digits; of a run that is held, once it may go
    on."""
    while _is_held():
        time.sleep(0.05)
    assert api_key is None or not api_key.startswith("$")
    wanted = sum(c in "aeiouAEIOU0123456789" for c in completion)
    return wanted / max(len(completion), 1)


def _is_held() -> bool:
    """Whether a test holds the run: HOLD_FILE has the number of recorded steps after which it is,
    HOLD_METRICS says how many there are (`runs.hold`)."""
    try:
        most = int(Path(os.environ["HOLD_FILE"]).read_text())
        num_recorded = Path(os.environ["HOLD_METRICS"]).read_bytes().count(b"\n")
    except KeyError:  # of another test
        return False
    except FileNotFoundError:  # let go, or nothing is recorded yet
        return False
    return num_recorded >= most
