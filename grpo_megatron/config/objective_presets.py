"""Named objectives: fixed combinations of choices, with the values of their papers, which
`objective_presets.toml` beside this file holds."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ObjectivePreset:
    """One documented combination."""

    title: str
    source: str
    evidence: str
    use: str
    """When to choose it."""
    values: Mapping[str, Any]
    """Of `ObjectiveConfig`; everything else has its default."""
    group_size: int | None = None
    """The only group size for which it is defined."""
    with_data: Mapping[str, Any] = field(default_factory=dict)
    """Settings outside of `[objective]` that the paper combines it with (not applied)."""


PRESETS: dict[str, ObjectivePreset] = {
    name: ObjectivePreset(**fields) for name, fields in
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()}
