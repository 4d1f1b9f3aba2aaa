"""Named objectives, from `objective_presets.toml`."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from grpo_megatron.config.base import Strict


class ObjectivePreset(Strict):
    """One documented combination."""

    title: str
    source: str
    evidence: Literal["S", "M", "E"]
    """Strong (frontier use or several independent replications), moderate, emerging (one paper)."""
    use: str
    """When to choose it."""
    values: dict[str, Any]
    """Of `ObjectiveConfig`; everything else has its default."""
    group_size: int | None = None
    """The only group size for which it is defined."""
    with_data: dict[str, Any] = {}
    """Settings outside of `[objective]` that the paper combines it with (not applied)."""


PRESETS = {name: ObjectivePreset(**table) for name, table in tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()}
