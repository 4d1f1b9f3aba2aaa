"""The layout of a run directory: the one place that knows its file names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    """`runs/<name>/`: everything a run writes.

    config.json        resolved configuration with provenance
    metrics.jsonl      one line per step: the truth that mirrors copy
    metrics_normalisers.json  what each metric is a mean over
    events.jsonl       starts, deaths, checkpoints, publishes
    store/step_000123/ immutable, checksummed samples of one step
    samples/           best and worst completions per step, readable
    checkpoints/       step_000100/: Megatron distributed checkpoint and run state
    logs/              one file per process
    endpoints/         addresses that processes publish for each other
    model/             the initial Hugging Face checkpoint, when the run made it
    export/            the final Hugging Face checkpoint
    """

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def step_store(self, step: int) -> Path:
        return self.store / f"step_{step:06d}"

    def step_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def create(self) -> None:
        """Make the directory and its fixed sub-directories (idempotent)."""
        for path in (self.root, self.store, self.samples, self.checkpoints, self.logs,
                     self.endpoints):
            path.mkdir(parents=True, exist_ok=True)
