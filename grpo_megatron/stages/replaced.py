"""What stages had before they were submitted anew, which a refusal of Slurm must not cost."""

from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.files import remove_directory, write_atomically
from grpo_megatron.launch import slurm
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.stages.records import Records


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A stage as it was.

    Attributes:
        result: Text of its `result.json`; None: it had none.
        goes_on: Its directory stays."""

    result: str | None
    goes_on: bool


class ReplacedStages:
    """Keeps the directory of every stage that begins anew, and the result of one that goes on,
    until all jobs of a graph are queued."""

    def __init__(self, records: Records):
        self._records = records
        self._earlier: dict[str, _Earlier] = {}

    def place(self, name: str) -> Path:
        """Return where the directory that a stage had is kept; no stage has this name."""
        return self._records.directory.root / f".before-{name}"

    def put_back_left(self) -> None:
        """Put back what a command that was killed has kept, where the stage that was to replace it
        has no job and did not begin."""
        for name in self._records.graph.order:
            run_dir = self._records.graph.run_dir(name)
            # of a merge there is no attempt, but a result at its end
            has_begun = (run_dir.logs / "latest").exists() or run_dir.result.exists()
            if self.place(name).exists() and not has_begun and slurm.active_job(run_dir) is None:
                remove_directory(run_dir.root)
                self.place(name).rename(run_dir.root)

    def begin(self, name: str, *, goes_on: bool) -> None:
        """Begin a stage with an empty place for its directory, unless it goes on with what it
        has. RunLockedError where somebody writes what it has."""
        run_dir = self._records.graph.run_dir(name)
        if not run_dir.root.exists():
            self._begin(name, goes_on=goes_on)
            return
        with run_lock(run_dir):
            self._begin(name, goes_on=goes_on)

    def _begin(self, name: str, *, goes_on: bool) -> None:
        run_dir = self._records.graph.run_dir(name)
        self._earlier[name] = _Earlier(_text(run_dir.result), goes_on)
        if goes_on:
            self._records.go_on(name)
            return
        self._records.directory.root.mkdir(parents=True, exist_ok=True)
        remove_directory(self.place(name))  # of a stage that has begun since
        if run_dir.root.exists():
            run_dir.root.rename(self.place(name))
        self._records.begin(name)

    def put_back(self, name: str) -> None:
        """Make a stage what it was before it began. Nothing where it did not begin."""
        earlier = self._earlier.pop(name, None)
        if earlier is None:
            return
        run_dir = self._records.graph.run_dir(name)
        if not earlier.goes_on:
            remove_directory(run_dir.root)
            if self.place(name).exists():
                self.place(name).rename(run_dir.root)
        elif earlier.result is not None:
            write_atomically(run_dir.result, earlier.result)

    def remove(self) -> None:
        """Remove what is kept: every job is queued."""
        for name in self._earlier:
            remove_directory(self.place(name))


def _text(file: Path) -> str | None:
    if not file.is_file():
        return None
    return file.read_text(encoding="utf-8", errors="replace")
