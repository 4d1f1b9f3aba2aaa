"""The base of every configuration record."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

InputPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""Relative to the current directory; kept absolute, since a resumed run may have another."""


_HELP = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))


class Strict(BaseModel):
    """Frozen; unknown keys are errors; what the keys mean is said in `help.toml`, or below them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True,
                              allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, text in _HELP.get(cls.__name__, {}).items():
            cls.model_fields[name].description = text
        cls.model_rebuild(force=True)
