"""A reward that an untrained policy earns in part, so that short runs have gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vowels(
    completion: str,
    answer: str,
    *,
    prompt: str,
    metadata: Mapping[str, Any],
    api_key: str | None = None,
) -> float:
    """Fraction of the characters that are vowels or digits."""
    assert api_key is None or not api_key.startswith("$")
    wanted = sum(c in "aeiouAEIOU0123456789" for c in completion)
    return wanted / max(len(completion), 1)
