"""The layout of a run directory: the one place that knows its file names."""

import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.errors import ConfigError, SetupError, raised_as

_WRITTEN_AT_THE_END = ("export", "adapter")
"""Entries of a run's directory that other runs begin with."""


def engine_name(index: int) -> str:
    """Return the name of an engine, by which files, events and messages call it."""
    return f"rollout-{index}"


def engine_number(name: str) -> int | None:
    """Return the number of the engine that has this name; None: a process of another kind has."""
    kind, _, number = name.rpartition("-")
    if kind != "rollout":
        return None
    return int(number)


class _Entry:
    """A path below the root of a run directory; with `by_attempt`, of one start of the run."""

    def __init__(self, name: str, *, by_attempt: bool = False):
        self._name = name
        self._by_attempt = by_attempt

    def __get__(self, run: "RunDir", owner: type) -> Path:
        path = run.root / self._name
        if self._by_attempt:
            path /= run.attempt
        return path


@dataclass(frozen=True)
class RunDir:
    """`runs/<name>/`: everything a run writes."""

    root: Path
    attempt: str = ""  # names one start of the run: `1`, `2`, …, or Slurm's job and restart count

    config = _Entry("config.json")  # resolved configuration with provenance
    config_history = _Entry("config_history")  # step_000123.json: what trained the steps from it on
    metrics = _Entry("metrics.jsonl")  # one line per step: the truth that mirrors copy
    metrics_normalisers = _Entry("metrics_normalisers.json")  # what each metric is a mean over
    events = _Entry("events.jsonl")  # starts, deaths, checkpoints, publishes
    store = _Entry("store")  # step_000123/: immutable, checksummed samples of one step
    images = _Entry("images")  # of prompts, by the digests of their bytes
    rollouts = _Entry("rollouts", by_attempt=True)  # samples that are not in the store yet
    samples = _Entry("samples")  # best and worst completions per step, readable
    checkpoints = _Entry("checkpoints")  # step_000100/: Megatron checkpoint and run state
    logs = _Entry("logs", by_attempt=True)  # one file per process; `logs/latest` is a link
    endpoints = _Entry("endpoints", by_attempt=True)  # addresses that processes publish
    progress = _Entry("progress", by_attempt=True)  # what each process is doing, see `progress`
    slurm = _Entry("slurm")  # the batch script and the job that runs it
    stage_record = _Entry("stage")  # what a stage of a graph began with here
    model = _Entry("model")  # the initial Hugging Face checkpoint, when the run made it
    dataset = _Entry("dataset.jsonl")  # of rejection sampling
    experience = _Entry("experience.json")  # lessons of a run of kind experience, and its state
    reference = _Entry("reference")  # log-probs of preferences under the reference
    result = _Entry("result.json")  # accuracies, seconds, steps of a finished run
    earlier_result = _Entry("earlier_result.json")  # of a finished run that trained on since
    export = _Entry("export")  # the final Hugging Face checkpoint, or those of domains (`exports`)
    adapter = _Entry("adapter")  # beside the export, of a run with [lora]: PEFT's files
    lock = _Entry(".lock")  # held by the process that writes here

    def step_store(self, step: int) -> Path:
        """Return where the samples of a step are recorded."""
        return self.store / f"step_{step:06d}"

    def step_checkpoint(self, step: int) -> Path:
        """Return where the checkpoint after a step is."""
        return self.checkpoints / f"step_{step:06d}"

    def step_settings(self, step: int) -> Path:
        """Return where the settings are recorded that trained the steps from `step` on."""
        return self.config_history / f"step_{step:06d}.json"

    def exports(self, adapter_domains: Sequence[str]) -> list[Path]:
        """Return where the Hugging Face checkpoints are at the end: one for each of the domains
        that have adapters of their own, else one."""
        if not adapter_domains:
            return [self.export]
        return [self.export / domain for domain in adapter_domains]

    @property
    def cold_start_checkpoints(self) -> Path:
        """Where the checkpoints of a cold start that has not ended are."""
        return self.checkpoints / "cold_start"

    def role_progress(self, role: str) -> Path:
        """Return where a role says what it is doing."""
        return self.progress / f"{role}.json"

    def command(self, *words: str) -> str:
        """Return the command `grpo-megatron WORDS` about this run as a shell takes it, whatever the
        directory is called."""
        return shlex.join(["grpo-megatron", *words, str(self.root)])

    def create(self) -> None:
        """Make the directory and its fixed sub-directories (idempotent)."""
        for path in (
            self.root,
            self.store,
            self.samples,
            self.checkpoints,
            self.logs,
            self.endpoints,
            self.progress,
        ):
            path.mkdir(parents=True, exist_ok=True)

    def outdate_result(self) -> None:
        """Rename the result of a run that goes on after its end: it says no longer how far the run
        is, nor that its export is the newest."""
        if self.result.exists():
            self.result.replace(self.earlier_result)

    @property
    def has_gone_on(self) -> bool:
        """Whether a run that had ended trains on, and has not ended again: its export is not the
        newest."""
        return self.earlier_result.is_file() and not self.result.is_file()

    def written(self) -> AbstractContextManager[None]:
        """Return a context in which an OSError (no permission, a full disk) is a SetupError."""
        return raised_as(
            SetupError,
            "cannot write the run's directory",
            OSError,
            where=self.root,
            remedy="choose another runs_dir=…",
        )

    @property
    def has_run(self) -> bool:
        """Whether a run's `config.json` is here, also one that is damaged, beside the run's events.
        Models of Hugging Face have a file of this name, too."""
        if not self.config.exists():
            return False
        if self.events.is_file() and (self.root / "logs").is_dir():
            return True
        try:
            values = json.loads(self.config.read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(values, dict) and values.keys() >= {"config", "provenance"}

    def refuse_existing(
        self,
        *,
        overwrite: bool = False,
        replace_by: str = "replace it: --overwrite",
        replaces_merge: bool = False,
    ) -> None:
        """ConfigError where a run is, unless it is to be replaced, or what no run has written.

        replace_by: what a user may do to have another run in its place. replaces_merge: what is
        here where no run is, a merge or an export of a graph, is to be replaced too."""
        if self.has_run:
            if overwrite:
                return
            raise ConfigError(
                f"run {self.root.name!r} exists",
                where=str(self.root),
                remedy=f"continue it with `{self.command('resume')}`, choose "
                f"another name=…, or {replace_by}",
            )
        if replaces_merge or not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if path in (self.lock, self.slurm, self.stage_record):
                continue
            if not path.is_dir() or any(path.iterdir()):
                raise ConfigError(
                    f"{self.root} is no run's directory: it has {path.name!r}",
                    where=str(self.root.absolute()),
                    remedy="choose another name=… or runs_dir=…",
                )

    def begin(self, attempt: str = "") -> "RunDir":
        """Return the directory as attempt `attempt` sees it, by default the next number; earlier
        attempts keep their logs."""
        folder = self.root / "logs"
        started = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()]
        run_dir = RunDir(self.root, attempt or str(max(started, default=0) + 1))
        for name in ("endpoints", "rollouts", "progress"):
            path = self.root / name
            if path.is_symlink():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
        run_dir.create()
        link = folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir.attempt)
        latest = folder / "latest"
        if latest.is_dir() and not latest.is_symlink():
            shutil.rmtree(latest)  # the run was copied, and the link with it as a folder
        link.replace(latest)
        return run_dir


def run_that_writes(path: Path) -> Path | None:
    """Return the directory of the run whose export or adapters are at `path`, or those of one of
    its domains, also before they are there; None where no run's are."""
    of_domain = path.parent
    for output in (path, of_domain):
        run = output.parent
        if output.name in _WRITTEN_AT_THE_END and (run / "config.json").is_file():
            return run
    return None
