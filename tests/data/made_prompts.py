"""Prompts for the tests of this folder."""

from __future__ import annotations

from grpo_megatron.types import Prompt


def prompt(name: str, domain: str = "addition", answer: str = "1") -> Prompt:
    return Prompt(f"{domain}-{name}", domain, f"{domain} {name}", (1, 2), answer)


def prompts(number: int, domain: str = "addition") -> list[Prompt]:
    return [prompt(str(index), domain) for index in range(number)]
