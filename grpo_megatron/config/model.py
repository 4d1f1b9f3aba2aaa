"""`[model]`: which policy is trained."""

from __future__ import annotations

from pathlib import Path

from grpo_megatron.config.base import Strict


class ModelConfig(Strict):
    """Exactly one of `preset` and `path`."""

    preset: str | None = None
    """Name of a file in `models/` whose architecture is initialised at random (from `seed`)."""
    path: Path | None = None
    """Hugging Face checkpoint directory to start from."""
