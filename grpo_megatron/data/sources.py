"""From `[[domains]]` to problems: the one place that knows which sources exist."""

from __future__ import annotations

from grpo_megatron.config.data import DomainConfig
from grpo_megatron.data.problems import Problem


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
