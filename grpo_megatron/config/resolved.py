"""A resolved configuration and its file, `config.json` in the run directory."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

import grpo_megatron
from grpo_megatron import assets
from grpo_megatron.config.base import Strict
from grpo_megatron.config.keys import dotted
from grpo_megatron.config.layers import Origin
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.files import write_atomically


class ResolvedConfig(Strict):
    """A valid configuration and where each of its values comes from."""

    format: Literal[1] = 1  # of the file
    version: str = Field(grpo_megatron.__version__, alias="grpo_megatron")  # which wrote it
    recipe: str  # it was made from, as messages show it
    config: RunConfig
    provenance: dict[str, Origin]  # of every leaf, by dotted key

    @property
    def run_path(self) -> Path:
        return self.config.runs_dir / self.config.name


def to_json(resolved: ResolvedConfig) -> str:
    """The text of `config.json`: stable key order, exact numbers."""
    return resolved.model_dump_json(indent=2, by_alias=True) + "\n"


def write_resolved(path: Path, resolved: ResolvedConfig) -> None:
    """Write `config.json` atomically; `loader.read_resolved` gives back an equal record."""
    write_atomically(path, to_json(resolved))


def read_stored(path: Path) -> ResolvedConfig:
    """Read a `config.json`, or the one in a run directory, as it is; ConfigError where it is
    missing, damaged, or written by a version with another schema."""
    file = path / "config.json" if path.is_dir() else path
    where = assets.display(file)
    try:
        return ResolvedConfig.model_validate_json(file.read_text(encoding="utf-8"), strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read the run's configuration: {error.strerror}", where=where,
                          remedy="give the directory of a run, for example runs/demo") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"the run's configuration is damaged: {dotted(first['loc'])}: {first['msg']}"
        raise ConfigError(what, where=where, remedy="use the version of grpo-megatron that wrote "
                          "it, or start the run again from its recipe") from None
