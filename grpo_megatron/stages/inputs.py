"""What a stage is made from now, but for the stages that it builds on: settings, files, the preset
of its model, and the parts of a merge. The library's code is none of it (docs/stages.md)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.changed_settings import values_of
from grpo_megatron.config.presets import load_preset
from grpo_megatron.errors import ConfigError, raised_as
from grpo_megatron.files import files_below
from grpo_megatron.stages.graph import Graph
from grpo_megatron.stages.own_files import own_files

_UNREADABLE = "whether it has changed since the stage began can only be said where it can be read"


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file, or all files below a folder: 1 TB is not read.

    Attributes:
        digest: SHA-256 of names, sizes and times.
        newest_ns: When the newest of them was written, in ns since 1970; 0: there is none."""

    digest: str
    newest_ns: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """See the module.

    Attributes:
        values: What `config.json` would hold; None of a merge or an export.
        preset: SHA-256 of the values of the model preset; empty: none.
        files: By path.
        parts: What a merge or an export takes, with weights; dtype and other files are those of
            the first one.
        dtype: Of a merge or an export."""

    values: dict[str, Any] | None
    preset: str
    files: dict[str, Stamp]
    parts: tuple[tuple[str, float], ...] = ()
    dtype: str | None = None


def present_inputs(graph: Graph, name: str) -> Inputs:
    """Return what a stage would be made from if it began now. ConfigError as of `Graph.resolve`."""
    stage = graph.table.stages[name]
    if stage.recipe is None:
        return Inputs(None, "", {}, tuple(stage.parts.items()), stage.dtype)
    resolved = graph.resolve(name)
    config = resolved.config
    preset = ""
    if config.model.preset:
        preset = _digest(load_preset(config.model.preset).file.values)
    made_by_stages = {graph.input(key, parent) for key, parent in stage.inputs.items()}
    files = {}
    for path in [*config.input_paths.values(), *own_files(config)]:
        if path not in made_by_stages:
            files[str(path)] = _stamp(path)
    return Inputs(values_of(resolved), preset, files)


def _stamp(path: Path) -> Stamp:
    files: Sequence[Path] = ()
    if path.is_dir():
        with raised_as(ConfigError, "unreadable", OSError, where=path, remedy=_UNREADABLE):
            files = list(files_below(path))
    elif path.exists():
        files = [path]
    seen = []
    newest_ns = 0
    for file in files:
        about = file.stat()
        name = file.relative_to(path.parent).as_posix()
        seen.append([name, about.st_size, about.st_mtime_ns])
        newest_ns = max(newest_ns, about.st_mtime_ns)
    return Stamp(_digest(seen), newest_ns)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
