"""The layout of a run directory: the one place that knows its file names."""

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.errors import ConfigError, SetupError, raised_as


def _entry(name: str, *, by_attempt: bool = False) -> property:
    return property(lambda run: run.root / name / (run.attempt if by_attempt else ""))


@dataclass(frozen=True)
class RunDir:
    """`runs/<name>/`: everything a run writes."""

    root: Path
    attempt: str = ""  # names one start of the run: `1`, `2`, …, or Slurm's job and restart count

    config = _entry("config.json")  # resolved configuration with provenance
    metrics = _entry("metrics.jsonl")  # one line per step: the truth that mirrors copy
    metrics_normalisers = _entry("metrics_normalisers.json")  # what each metric is a mean over
    events = _entry("events.jsonl")  # starts, deaths, checkpoints, publishes
    store = _entry("store")  # step_000123/: immutable, checksummed samples of one step
    samples = _entry("samples")  # best and worst completions per step, readable
    checkpoints = _entry("checkpoints")  # step_000100/: Megatron checkpoint and run state
    logs = _entry("logs", by_attempt=True)  # one file per process; `logs/latest` is a link
    endpoints = _entry("endpoints", by_attempt=True)  # addresses that processes publish
    slurm = _entry("slurm")  # the batch script and the job that runs it
    model = _entry("model")  # the initial Hugging Face checkpoint, when the run made it
    dataset = _entry("dataset.jsonl")  # of rejection sampling
    result = _entry("result.json")  # accuracies, seconds, steps of a finished run
    export = _entry("export")  # the final Hugging Face checkpoint
    lock = _entry(".lock")  # held by the process that writes here

    def step_store(self, step: int) -> Path:
        return self.store / f"step_{step:06d}"

    def step_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def cold_start_checkpoints(self) -> Path:
        """As `checkpoints`, of a cold start that has not ended."""
        return self.checkpoints / "cold_start"

    def create(self) -> None:
        """Make the directory and its fixed sub-directories (idempotent)."""
        for path in (
            self.root,
            self.store,
            self.samples,
            self.checkpoints,
            self.logs,
            self.endpoints,
        ):
            path.mkdir(parents=True, exist_ok=True)

    def written(self) -> AbstractContextManager[None]:
        """A context in which an OSError (no permission, a full disk) is a SetupError."""
        return raised_as(
            SetupError,
            "cannot write the run's directory",
            OSError,
            where=self.root,
            remedy="choose another runs_dir=…",
        )

    def refuse_existing(self, *, overwrite: bool = False) -> None:
        """ConfigError where a run is, unless it is to be replaced, or what no run has written."""
        for path in self.root.iterdir() if self.root.is_dir() and not self.config.exists() else ():
            if path not in (self.lock, self.slurm) and (path.is_file() or any(path.iterdir())):
                raise ConfigError(
                    f"{self.root} is no run's directory: it has {path.name!r}",
                    where=str(self.root.absolute()),
                    remedy="choose another name=… or runs_dir=…",
                )
        if self.config.exists() and not overwrite:
            raise ConfigError(
                f"run {self.root.name!r} exists",
                where=str(self.root),
                remedy=f"continue it with `grpo-megatron resume {self.root}`, choose "
                "another name=…, or replace it: train --overwrite",
            )

    def begin(self, attempt: str = "") -> "RunDir":
        """As attempt `attempt` sees it, else the next number; earlier ones keep their logs."""
        folder = self.root / "logs"
        started = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()]
        run_dir = RunDir(self.root, attempt or str(max(started, default=0) + 1))
        shutil.rmtree(self.root / "endpoints", ignore_errors=True)
        run_dir.create()
        link = folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(run_dir.attempt)
        if (latest := folder / "latest").is_dir() and not latest.is_symlink():
            shutil.rmtree(latest)  # the run was copied, and the link with it as a folder
        link.replace(latest)
        return run_dir
