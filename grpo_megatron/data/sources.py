"""From `[[domains]]` to problems, before templates and tokens: which sources exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.data import DomainConfig


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


def load_problems(domain: DomainConfig, seed: int) -> list[Problem]:
    """All problems of one domain, in the source's order, possibly with duplicates.

    Args:
        domain: Which source to read.
        seed: Seed of procedural sources; files ignore it.

    Raises:
        DataError: Unknown data set, argument, file or field; an unreadable line.
    """
    # Imported here: each source pulls in a library that the other one does not need.
    if domain.source == "reasoning_gym":
        from grpo_megatron.data.reasoning_gym_source import load_reasoning_gym

        return load_reasoning_gym(domain, seed)
    from grpo_megatron.data.file_source import load_file

    return load_file(domain)
