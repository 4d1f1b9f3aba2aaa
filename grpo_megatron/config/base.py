"""The base of every configuration record."""

import inspect
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from grpo_megatron import assets

InputPath = Annotated[Path, AfterValidator(assets.input_path)]
"""Relative to the current directory; kept absolute, since a resumed run may have another."""


class Strict(BaseModel):
    """Frozen; unknown keys are errors. The docstring under a field is its description in messages,
    `config schema`, `--help` and docs."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Lay docstrings out as one line, however they are wrapped in the source."""
        cls.__doc__ = _one_line(cls.__doc__)
        for field in cls.model_fields.values():
            if field.description:
                field.description = _one_line(field.description)
        cls.model_rebuild(force=True)


def _one_line(text: str | None) -> str | None:
    if not text:
        return text
    return " ".join(inspect.cleandoc(text).split())
