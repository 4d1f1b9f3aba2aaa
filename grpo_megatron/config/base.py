"""The base of every configuration record."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

InputPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""Relative to the current directory; kept absolute, since a resumed run may have another."""


class Strict(BaseModel):
    """Frozen; unknown keys are errors; attribute docstrings become help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True,
                              allow_inf_nan=False)
