"""Which stages are done, and whether what they were made from is still the same."""

import hashlib
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

from grpo_megatron.config.changed_settings import ChangedSettings, changed_settings, read_values
from grpo_megatron.config.gates import closed_gates, read_result
from grpo_megatron.errors import ConfigError
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.stage_record import (
    NO_INPUTS,
    StageRecord,
    kind_of_merge,
    read_stage_record,
)
from grpo_megatron.rundir import RunDir
from grpo_megatron.stages.graph import Graph, is_there
from grpo_megatron.stages.inputs import Inputs, present_inputs
from grpo_megatron.telemetry.made_with import present_code, record_code, recorded_codes

_MANY = 3
"""Changes that are told by name."""


class State(StrEnum):
    """How far a stage is, by what it is called on the screen."""

    WAITING = "waiting"  # for other stages
    READY = "ready"
    PARTIAL = "begun"  # with the same inputs as now: it can go on
    GATED = "gate closed"
    DONE = "done"


class Records:
    """What stages were begun with, each in its run directory, where whoever has the run's lock
    writes it; whether one is finished the directory says too.

    anew: stages that are not done, whatever they have, until they begin."""

    def __init__(self, graph: Graph, anew: Collection[str] = ()):
        self.graph = graph
        self.directory = RunDir(graph.root / "records")
        self._anew = set(anew)
        self._inputs: dict[str, Inputs] = {}
        self._compared: dict[tuple[str, int, int], ChangedSettings] = {}
        """By stage, and number and time of its configuration's file."""

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
        return self._has_begun(name) and self._problem(name) == "" and not self._changes(name)

    def _has_begun(self, name: str) -> bool:
        """Whether the graph has begun it, with a configuration where it needs one."""
        run_dir = self.graph.run_dir(name)
        is_run = self.graph.table.stages[name].recipe is not None
        return run_dir.stage_record.is_file() and (run_dir.config.is_file() or not is_run)

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
        gone. What else is there must be of this record, or be made anew whatever is there."""
        self._begin(name, self._new_record(name).text)

    def _begin(self, name: str, record: str) -> None:
        run_dir = self.graph.run_dir(name)
        run_dir.result.unlink(missing_ok=True)  # no longer of this record
        run_dir.root.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir.stage_record, record)
        self.has_begun_anew(name)

    def begin_merge(self, name: str, record: str) -> None:
        """Do what `begin` does, with a record that `text_for_run` gave, and record the code that
        makes it."""
        self._begin(name, record)
        events = self.graph.run_dir(name).events
        events.unlink(missing_ok=True)
        record_code(events)

    def go_on(self, name: str) -> None:
        """Have a stage go on that has no process yet: it is not at its end whatever it has."""
        self.graph.run_dir(name).result.unlink(missing_ok=True)

    def has_begun_anew(self, name: str) -> None:
        """Note that a stage which was to begin anew has done so, or was refused."""
        self._anew.discard(name)

    def text_for_run(self, name: str, *, goes_on: bool) -> str:
        """Return the record that a stage's run is to write when it begins, or is to find when it
        goes on."""
        if goes_on:
            return self.graph.run_dir(name).stage_record.read_text(encoding="utf-8")
        return self._new_record(name).text

    def _new_record(self, name: str) -> StageRecord:
        inputs = self.inputs(name)
        return StageRecord(
            preset=inputs.preset,
            files={path: stamp.digest for path, stamp in inputs.files.items()},
            parts=inputs.parts,
            dtype=inputs.dtype,
            parents={parent: self._identity(parent) for parent in self._sources(name)},
        )

    def result(self, name: str) -> dict[str, Any]:
        """Return the values of `result.json`; empty before the stage's end, and where it is one of
        other inputs. ConfigError where it is damaged."""
        if not self._has_ended(name):
            return {}
        return read_result(self.graph.run_dir(name).root)

    def changed_since(self, name: str) -> str:
        """Return in what a stage that has begun differs from what it would be now; empty where it
        has not begun or is the same."""
        if name in self._anew:
            return "as asked for"
        if not self._has_begun(name):
            return self._what_is_there(name)
        problem = self._problem(name)
        if problem:
            return problem
        changes = self._changes(name)
        if not changes:
            return ""
        return f"changed: {_few(changes)}"

    def _what_is_there(self, name: str) -> str:
        """Return what the place of a stage has that has not begun; empty: nothing of a stage."""
        run_dir = self.graph.run_dir(name)
        if run_dir.has_run:
            return "the graph did not begin the run that is there"
        merge = kind_of_merge(run_dir)
        if merge:
            return f"changed: {_other_kind(merge)}"
        return ""

    def closed_gates(self, name: str) -> list[str]:
        """Gates that a stage misses, with what was seen; none before its end."""
        result = self.result(name)
        if not result:
            return []
        return closed_gates(self.graph.gates(name), result)

    def notes(self, name: str) -> list[str]:
        """Return what is to be known of a stage that counts as unchanged: that other code has made
        it, that some of its steps had other settings, or that its record says less than one of
        today."""
        run_dir = self.graph.run_dir(name)
        if not self.is_unchanged(name):
            return []
        notes = []
        record = read_stage_record(run_dir)
        if record is not None and record.format == 1:
            notes.append(
                "recorded by an earlier release, without its code: its settings are the same, and "
                "no file is newer"
            )
        notes += self._notes_on_code(name)
        earlier = self._settings_of_earlier_steps(name)
        if earlier:
            notes.append(f"its first steps had another {_few(earlier)}")
        return notes

    def _notes_on_code(self, name: str) -> list[str]:
        now = present_code()
        codes = recorded_codes(self.graph.run_dir(name).events)
        others = [str(code) for code in codes if code != now]
        if not others:
            return []
        share = ""
        if len(others) < len(codes):
            share = " in part"
        note = f"made{share} by other code: {' and '.join(others)}; now {now}"
        defaults = self._settings(name).defaults
        if defaults:
            note += f", with another default of {_few(defaults)}"
        return [note]

    def _settings_of_earlier_steps(self, name: str) -> list[str]:
        """Return settings with which a run has trained steps before it was resumed with others."""
        run_dir = self.graph.run_dir(name)
        files = sorted(run_dir.config_history.glob("step_*.json"))
        if not files:
            return []
        now = read_values(run_dir.config)  # which is sound: the stage counts as unchanged
        earlier: dict[str, None] = {}
        for file in files:
            try:
                then = read_values(file)
            except ConfigError:  # `replay` names it
                continue
            changes = changed_settings(then, now, left_out=NO_INPUTS)
            earlier.update(dict.fromkeys(changes.chosen))
        return list(earlier)

    def inputs(self, name: str) -> Inputs:
        """Return what a stage would be made from now, but for other stages."""
        if name not in self._inputs:
            self._inputs[name] = present_inputs(self.graph, name)
        return self._inputs[name]

    def _sources(self, name: str) -> list[str]:
        return self.graph.table.stages[name].sources

    def _identity(self, name: str) -> str:
        """Return what tells a stage as it was begun from every other; empty where it was not."""
        file = self.graph.run_dir(name).stage_record
        if not file.is_file():
            return ""
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def _problem(self, name: str) -> str:
        """Return why nobody can say what a stage that has begun was made from; empty: the files
        say."""
        if read_stage_record(self.graph.run_dir(name)) is None:
            return "its file `stage` is damaged, or of a later release"
        try:
            self._settings(name)
        except ConfigError:
            return "its config.json is damaged"
        return ""

    def _settings(self, name: str) -> ChangedSettings:
        """Return in which settings a stage that has begun differs from what it would have now.
        ConfigError where its `config.json` is damaged."""
        values = self.inputs(name).values
        if values is None:
            return ChangedSettings((), ())
        file = self.graph.run_dir(name).config
        about = file.stat()
        key = (name, about.st_ino, about.st_mtime_ns)
        if key not in self._compared:
            then = read_values(file)
            self._compared[key] = changed_settings(then, values, left_out=NO_INPUTS)
        return self._compared[key]

    def _changes(self, name: str) -> list[str]:
        """Return what of a stage that has begun is another now, by name."""
        if name in self._anew:
            return ["everything, as asked for"]
        run_dir = self.graph.run_dir(name)
        is_run = self.graph.table.stages[name].recipe is not None
        if run_dir.has_run and not is_run:
            return [_other_kind(_kind_of_run(run_dir))]
        record = read_stage_record(self.graph.run_dir(name))
        assert record is not None  # `_problem` says so
        changes = list(self._settings(name).chosen)
        if record.format == 1:
            changes += self._changes_after(name)
        else:
            changes += self._changes_since_record(name, record)
        return changes

    def _changes_since_record(self, name: str, record: StageRecord) -> list[str]:
        changes = []
        inputs = self.inputs(name)
        if inputs.preset != record.preset:
            changes.append("its model preset")
        for path, stamp in inputs.files.items():
            if record.files.get(path) != stamp.digest:
                changes.append(path)
        changes += [path for path in record.files if path not in inputs.files]
        if (inputs.parts, inputs.dtype) != (record.parts, record.dtype):
            changes.append("what it is made of")
        for parent in self._sources(name):
            is_the_same = self._identity(parent) == record.parents.get(parent)
            if not is_the_same or not self.is_unchanged(parent):
                changes.append(f"stage {parent}")
        return changes

    def _changes_after(self, name: str) -> list[str]:
        """Return what has changed since an earlier release began a stage, whose record does not say
        what that was: files that are newer, and stages that have begun after it."""
        changes = []
        begun_ns = self._begun_ns(name)
        for path, stamp in self.inputs(name).files.items():
            if stamp.newest_ns > begun_ns:
                changes.append(path)
        for parent in self._sources(name):
            if not self.is_unchanged(parent) or self._begun_ns(parent) > begun_ns:
                changes.append(f"stage {parent}")
        return changes

    def _begun_ns(self, name: str) -> int:
        return self.graph.run_dir(name).stage_record.stat().st_mtime_ns


def _kind_of_run(run_dir: RunDir) -> str:
    """Return the kind of the run that is in a directory, as far as its configuration says it."""
    try:
        values = read_values(run_dir.config)
    except ConfigError:
        return "that of a run"
    return str(values["config"].get("kind", "that of a run"))


def _other_kind(kind: str) -> str:
    """Return what has changed in a stage that was a run and is none now, or is one now."""
    return f"its kind, was {kind}"


def _few(names: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    told = ", ".join(names[:_MANY])
    if len(names) > _MANY:
        told += f" and {len(names) - _MANY} more"
    return told
