"""What a stage of a graph was begun with: the file `stage` of its run directory, which whoever has
the run's lock writes. Its settings are those of `config.json` beside it."""

import re
import sys
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, ValidationError

from grpo_megatron.config.base import Strict
from grpo_megatron.config.changed_settings import changed_settings, read_values, values_of
from grpo_megatron.config.loader import ResolvedConfig
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir

_EARLIER_FORM = re.compile(r"[0-9a-f]{64}")
"""One digest of everything, the library's code too."""


NO_INPUTS = ("runs_dir", "telemetry", "gates")
"""Settings that change nothing in what a stage makes."""


def _now() -> str:
    return datetime.now(UTC).isoformat()


class StageRecord(Strict):
    """Everything but the settings.

    Attributes:
        format: 1 where an earlier release began the stage: it recorded one digest of everything.
        begun: When, in UTC. It tells a stage from the same one that is made anew.
        preset: SHA-256 of the values of the model preset; empty: none.
        files: SHA-256 of names, sizes and times, by path.
        parts: What a merge or an export takes, with weights.
        dtype: Of a merge or an export.
        parents: SHA-256 of the records of the stages that it builds on."""

    format: Literal[1, 2] = 2
    begun: str = Field(default_factory=_now)
    preset: str = ""
    files: dict[str, str] = {}
    parts: tuple[tuple[str, float], ...] = ()
    dtype: str | None = None
    parents: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The file's."""
        return self.model_dump_json()


def read_stage_record(run_dir: RunDir) -> StageRecord | None:
    """Return the record of a stage; None where there is none, or one that is damaged."""
    try:
        text = run_dir.stage_record.read_text(encoding="utf-8")
        if _EARLIER_FORM.fullmatch(text):
            return StageRecord(format=1, begun="")
        return StageRecord.model_validate_json(text, strict=True)
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def kind_of_merge(run_dir: RunDir) -> str:
    """Return what a graph has made, or begun to make, in a directory that is no run's: `merge` or
    `export`, or both where the record does not say which; empty: neither."""
    if run_dir.config.exists() or not run_dir.stage_record.is_file():
        return ""
    record = read_stage_record(run_dir)
    if record is None or record.format == 1:
        if run_dir.checkpoints.exists():  # of a run that has lost its configuration
            return ""
        return "merge or export"
    if len(record.parts) > 1:
        return "merge"
    if record.parts:
        return "export"
    return ""


def tell_changed_stage(run_dir: RunDir, resolved: ResolvedConfig) -> None:
    """Where a run that is a stage is about to be resumed by hand with other settings, make it
    another stage than that which others have built on, and say on stderr what follows. Call it
    before its `config.json` is written."""
    record = read_stage_record(run_dir)
    if record is None:
        return
    then = read_values(run_dir.config)
    changes = changed_settings(then, values_of(resolved), left_out=NO_INPUTS)
    if not changes.chosen:
        return
    renewed = record.model_copy(update={"begun": _now()})
    write_atomically(run_dir.stage_record, renewed.text)
    print(
        f"{run_dir.root} is a stage of a graph, with another {', '.join(changes.chosen)} from here "
        "on: `stages run` and `stages submit` make it anew where the graph does not set the same, "
        "and in any case what was built on it",
        file=sys.stderr,
        flush=True,
    )


def text_of_stage(run_dir: RunDir) -> str:
    """Return the text of a stage's record, for `put_back_stage`; empty where there is none."""
    try:
        return run_dir.stage_record.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""


def put_back_stage(run_dir: RunDir, text: str) -> None:
    """Make a stage what it was before a resume that was refused."""
    if text and text_of_stage(run_dir) != text:
        write_atomically(run_dir.stage_record, text)
