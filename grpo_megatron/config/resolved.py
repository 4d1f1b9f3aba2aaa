"""A resolved configuration and its file, `config.json` in the run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

import grpo_megatron
from grpo_megatron import assets
from grpo_megatron.config.keys import dotted, leaves
from grpo_megatron.config.objective_presets import PRESETS
from grpo_megatron.config.provenance import DEFAULT, Layers, Origin
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A valid configuration and where each of its values comes from."""

    config: RunConfig
    provenance: Mapping[str, Origin]
    """Origin of every leaf, by dotted key."""
    recipe: str
    """The recipe it was made from, as messages show it."""

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return self.config.runs_dir / self.config.name


def resolved_from(config: RunConfig, layers: Layers, recipe: str) -> ResolvedConfig:
    """Pair a configuration with the origins recorded while its tree was merged."""
    tree = config.model_dump(mode="json")
    objective = Origin("preset", f"objective preset {config.objective.preset}")
    below = {("objective", key): objective for key in PRESETS[config.objective.preset].values}
    origins = {**below, **layers.origins}
    return ResolvedConfig(
        config, {dotted(path): origins.get(path, DEFAULT) for path, _ in leaves(tree)}, recipe)


def to_json(resolved: ResolvedConfig) -> str:
    """The text of `config.json`: stable key order, exact numbers."""
    return json.dumps({
        "format": _FORMAT,
        "grpo_megatron": grpo_megatron.__version__,
        "recipe": resolved.recipe,
        "config": resolved.config.model_dump(mode="json"),
        "provenance": {key: asdict(origin) for key, origin in resolved.provenance.items()},
    }, indent=2, ensure_ascii=False) + "\n"


def write_resolved(path: Path, resolved: ResolvedConfig) -> None:
    """Write `config.json` atomically; `loader.read_resolved` gives back an equal record."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(to_json(resolved))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_stored(path: Path) -> ResolvedConfig:
    """Read a `config.json`, or the one in a run directory, as it is.

    Raises:
        ConfigError: Missing, damaged, or written by a version with another schema.
    """
    file = path / "config.json" if path.is_dir() else path
    where = assets.display(file)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ConfigError(f"config.json has format {data['format']}, not {_FORMAT}",
                              where=where, remedy="use the version of grpo-megatron that wrote it")
        config = RunConfig.model_validate_json(json.dumps(data["config"]), strict=True)
        provenance = {key: Origin(**origin) for key, origin in data["provenance"].items()}
        return ResolvedConfig(config, provenance, data["recipe"])
    except OSError as error:
        raise ConfigError(f"cannot read the run's configuration: {error.strerror}", where=where,
                          remedy="give the directory of a run, for example runs/demo") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{dotted(first['loc'])}: {first['msg']}", where=where,
                          remedy="use the version of grpo-megatron that wrote it") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the run's configuration is damaged: {error!r}", where=where,
                          remedy="start the run again from its recipe") from None
