"""The base of every configuration record."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from grpo_megatron import assets

InputPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""Relative to the current directory; kept absolute, since a resumed run may have another."""

_HELP = assets.tables(__file__, "help.toml")


class Strict(BaseModel):
    """Frozen; unknown keys are errors; what a table and its keys mean is said in `help.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        texts = {"about": cls.__doc__, **_HELP.get(cls.__name__, {})}
        cls.__doc__ = texts.pop("about")
        for name, text in texts.items():
            cls.model_fields[name].description = text
        cls.model_rebuild(force=True)
