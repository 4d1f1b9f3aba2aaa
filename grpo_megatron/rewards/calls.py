"""What a reward pool and its processes send one another: calls, and how they ended."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_megatron.file_part import FilePart


class Call(NamedTuple):
    """One reward component of one completion; sent to a process in a pickle."""

    component: int
    """Its number among the functions that the process has."""
    completion: str | FilePart
    answer: str
    context: Mapping[str, Any]
    """Further arguments of the function, by name. What lies in a file is read by the process;
    `metadata` is a pickle, which the calls of a prompt share until each reads one of its own: a
    function may change what it is given."""


class CallOutcome(NamedTuple):
    """How one call ended; sent to the parent as a JSON list."""

    failure: str = ""
    """`raised`, `timed_out` or `died`; the parent writes the last. Empty where it has a value."""
    value: float = math.nan
    steps: Sequence[tuple[int, float]] = ()
    """Step rewards: (end in the text, reward) each."""
    trace: str = ""
    """Of what it raised."""
