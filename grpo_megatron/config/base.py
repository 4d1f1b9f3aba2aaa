"""The base of every configuration record."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen; unknown keys are errors; attribute docstrings become help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True,
                              allow_inf_nan=False)
