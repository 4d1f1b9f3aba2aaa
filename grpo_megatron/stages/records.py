"""Which stages are done, and whether what they were made from is still the same."""

import hashlib
import json
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import grpo_megatron
from grpo_megatron.config.gates import closed_gates, read_result
from grpo_megatron.config.keys import dotted, leaves
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.graph import Graph, is_there
from grpo_megatron.stages.own_files import own_files

_NO_INPUTS = {"runs_dir", "telemetry", "gates"}
"""Settings that change nothing in what a stage makes."""
_MANY = 3
"""Changed settings that are told by name."""


class State(StrEnum):
    """How far a stage is, by what it is called on the screen."""

    WAITING = "waiting"  # for other stages
    READY = "ready"
    PARTIAL = "begun"  # with the same inputs as now: it can go on
    GATED = "gate closed"
    DONE = "done"


class Records:
    """Fingerprints of stages as they were begun, each in its run directory, where whoever has the
    run's lock writes it; whether one is finished the directory says too."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.directory = RunDir(graph.root / "records")
        self._fingerprints: dict[str, str] = {}

    def state(self, name: str) -> State:
        """Say how far a stage is, which depends on its parents too."""
        if self.unfinished_parents(name):
            return State.WAITING
        if not self.is_unchanged(name):
            return State.READY
        if not self.graph.run_dir(name).result.exists():
            return State.PARTIAL
        if self.closed_gates(name):
            return State.GATED
        if not self._keeps_what_is_taken(name):
            return State.PARTIAL
        return State.DONE

    def unfinished_parents(self, name: str) -> list[str]:
        """Return stages that it waits for and that are not done."""
        parents = self.graph.table.stages[name].parents
        return [parent for parent in parents if self.state(parent) is not State.DONE]

    def is_unchanged(self, name: str) -> bool:
        """Whether the stage was begun with what it would begin with now."""
        file = self.graph.run_dir(name).stage_fingerprint
        return file.is_file() and file.read_bytes() == self.fingerprint(name).encode()

    def _has_ended(self, name: str) -> bool:
        return self.is_unchanged(name) and self.graph.run_dir(name).result.exists()

    def _keeps_what_is_taken(self, name: str) -> bool:
        """Whether what a stage has made is still there as a whole for those that take it and have
        not ended, or, of a last stage, at all: what nobody takes any more may be removed to make
        room."""
        graph = self.graph
        takers = graph.takers(name)
        if not takers:
            return graph.gives_only_numbers(name) or graph.has_output(name)
        for taker in takers:
            if self._has_ended(taker):
                continue
            if not all(map(is_there, graph.taken(taker, name))):
                return False
        return True

    def begin(self, name: str) -> None:
        """Record what a stage begins with that has no process yet; the result that it may have is
        gone. What else is there must be of this fingerprint, or be made anew whatever is there."""
        run_dir = self.graph.run_dir(name)
        run_dir.result.unlink(missing_ok=True)  # no longer of this fingerprint
        run_dir.root.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir.stage_fingerprint, self.fingerprint(name))

    def result(self, name: str) -> dict[str, Any]:
        """Return the values of `result.json`; empty before the stage's end, and where it is one of
        other inputs. ConfigError where it is damaged."""
        if not self._has_ended(name):
            return {}
        return read_result(self.graph.run_dir(name).root)

    def changed_since(self, name: str) -> str:
        """Return in what a stage that has begun differs from what it would be now: settings, or
        something else; empty where it has not begun or is the same."""
        run_dir = self.graph.run_dir(name)
        if self.is_unchanged(name) or not run_dir.has_run:
            return ""
        now = _settings(self.graph.resolve(name).config)
        try:
            then = _settings(read_resolved(run_dir.config).config)
        except ConfigError:
            return "another release began it, or its config.json is damaged"
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        if not keys:
            return "a file, code, or what it builds on has changed"
        told = ", ".join(keys[:_MANY])
        if len(keys) > _MANY:
            told += f" and {len(keys) - _MANY} more"
        return f"changed: {told}"

    def closed_gates(self, name: str) -> list[str]:
        """Gates that a stage misses, with what was seen; none before its end."""
        result = self.result(name)
        if not result:
            return []
        return closed_gates(self.graph.gates(name), result)

    def fingerprint(self, name: str) -> str:
        """Return the fingerprint of a stage's settings, files and code, and of what it builds on;
        its gates may change."""
        if name in self._fingerprints:
            return self._fingerprints[name]
        graph = self.graph
        stage = self.graph.table.stages[name]
        known: dict[str, Any] = {
            "code": _code(),
            "stage": stage.model_dump(mode="json", exclude={"gates"}),
            "parts": list(stage.parts.items()),  # the first one decides on dtype and other files
            "parents": {source: self.fingerprint(source) for source in stage.sources},
        }
        if stage.recipe is not None:
            config = graph.resolve(name).config
            known["config"] = config.model_dump(mode="json", exclude=_NO_INPUTS)
            made = {graph.input(key, parent) for key, parent in stage.inputs.items()}
            known["preset"] = config.model.preset and load_preset(config.model.preset).file.values
            files = {}
            for path in [*config.input_paths.values(), *own_files(config)]:
                if path not in made:
                    files[str(path)] = _stamp(path)
            known["files"] = files
        text = json.dumps(known, sort_keys=True).encode()
        self._fingerprints[name] = hashlib.sha256(text).hexdigest()
        return self._fingerprints[name]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of which a stage is made, by dotted key."""
    values = config.model_dump(mode="json", exclude=_NO_INPUTS)
    return {dotted(path): value for path, value in leaves(values)}


@cache
def _code() -> str:
    """Fingerprint of the library's source and data."""
    digest = hashlib.sha256()
    package = Path(grpo_megatron.__file__).parent
    for file in sorted(package.rglob("*")):
        if file.suffix not in (".py", ".toml", ".txt"):
            continue
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _stamp(path: Path) -> list[Any]:
    """Names, sizes and times of a file, or of all files below a folder; 1 TB is not read."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    elif path.exists():
        files = [path]
    else:
        files = []
    stamps = []
    for file in files:
        about = file.stat()
        name = file.relative_to(path.parent).as_posix()
        stamps.append([name, about.st_size, about.st_mtime_ns])
    return stamps
