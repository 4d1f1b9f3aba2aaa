"""`Problem`: what a source yields, before templates and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its expected answer.

    Example: `Problem("addition", "What is 37 + 48?", "85", {"expression": "37 + 48"})`

    `metadata` holds everything else that the source knows; it never holds the answer field.
    """

    domain: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
