"""The layout of a run directory: the one place that knows its file names."""

from dataclasses import dataclass
from pathlib import Path


class _Entry:
    def __init__(self, name: str):
        self._name = name

    def __get__(self, run_dir: "RunDir", _: object = None) -> Path:
        return run_dir.root / self._name


@dataclass(frozen=True)
class RunDir:
    """`runs/<name>/`: everything a run writes."""

    root: Path

    config = _Entry("config.json")  # resolved configuration with provenance
    metrics = _Entry("metrics.jsonl")  # one line per step: the truth that mirrors copy
    metrics_normalisers = _Entry("metrics_normalisers.json")  # what each metric is a mean over
    events = _Entry("events.jsonl")  # starts, deaths, checkpoints, publishes
    store = _Entry("store")  # step_000123/: immutable, checksummed samples of one step
    samples = _Entry("samples")  # best and worst completions per step, readable
    checkpoints = _Entry("checkpoints")  # step_000100/: Megatron checkpoint and run state
    logs = _Entry("logs")  # one file per process
    endpoints = _Entry("endpoints")  # addresses that processes publish for each other
    model = _Entry("model")  # the initial Hugging Face checkpoint, when the run made it
    export = _Entry("export")  # the final Hugging Face checkpoint
    lock = _Entry(".lock")  # held by the process that writes here

    def step_store(self, step: int) -> Path:
        return self.store / f"step_{step:06d}"

    def step_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def create(self) -> None:
        """Make the directory and its fixed sub-directories (idempotent)."""
        for path in (self.root, self.store, self.samples, self.checkpoints, self.logs,
                     self.endpoints):
            path.mkdir(parents=True, exist_ok=True)
