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
    is_awaited: bool = False
    """Whether a call that was answered in its order was to be awaited."""


class Chunk(NamedTuple):
    """Calls that a process gets at a time; sent to it in a pickle."""

    calls: Sequence[Call]
    is_async: bool
    """Whether all are to be awaited, beside one another; else they are answered in their order,
    except that a component of which one call was to be awaited has its others awaited together,
    behind all calls that are not."""

    def left_in_order(self, found: Mapping[int, CallOutcome]) -> list[int]:
        """Return the places of the calls without an outcome that are answered in their order.
        found: outcomes by place."""
        if self.is_async:
            return []
        awaited = set()
        for place, outcome in found.items():
            if outcome.is_awaited:
                awaited.add(self.calls[place].component)
        left = []
        for place, call in enumerate(self.calls):
            if place not in found and call.component not in awaited:
                left.append(place)
        return left
