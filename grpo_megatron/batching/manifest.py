"""`manifest.json` of a recorded step: what is known of it beside its columns."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.routing.shape import RouteShape

FORMAT = 2
MANIFEST_FILE = "manifest.json"
_CHECKSUM = "checksum"  # of all other values; an earlier release wrote none


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows of a step when it has sampled it.

    The defaults are those of completions that are recorded for a check or a cold start."""

    kind: str = "completions"
    """`rl` for a step of the RL loop."""
    step: int = 0
    """Counts from 0."""
    version: int = 0
    """Of the weights that were published when the step was asked for."""
    stale: bool = False
    """Whether any of it was sampled by older weights than those that it trains."""
    domains: list[str] = []
    """Names, in the order of the column `domain`."""
    verified_replicas: list[int] = []
    """Engines of which the samples can show what they compute."""
    engines: list[str] = []
    """Name of the engine that answered each group."""
    sampler: dict[str, Any] = {}
    """State of the prompt sampler after the step's draws."""
    metrics: dict[str, float] = {}
    """Of sampling and rewards, by name."""
    extremes: list[Mapping[str, Any]] = []
    """Samples to be shown (see `telemetry.samples`)."""
    dropped_rewards: dict[str, list[float]] = {}
    """Rewards of samples that are not trained, by domain, where advantages need them."""
    oldest_trained: int | None = None
    """Tokens of older weight versions have no loss; None: all tokens have one."""

    @property
    def is_skipped(self) -> bool:
        """Whether no group was kept, so that there is nothing to train."""
        return self.metrics["sampling/skipped_steps"] > 0


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of tokens."""

    name: str
    checksum: str
    routes: RouteShape | None = None
    """Of the routes in the file beside it, where they were recorded."""


class Manifest(StepFacts, frozen=True, kw_only=True):
    """The whole of `manifest.json`."""

    format: int
    """Version of the layout of the directory."""
    train_checksum: str
    shards: list[ShardEntry]

    def with_drops_of(self, domain: str) -> "Manifest":
        """Return the manifest with the dropped rewards of one domain only."""
        dropped = {}
        if domain in self.dropped_rewards:
            dropped[domain] = self.dropped_rewards[domain]
        return msgspec.structs.replace(self, dropped_rewards=dropped)

    @property
    def checksums(self) -> dict[str, str]:
        """Checksum of each file of columns, by its name in the directory."""
        found = {"train.safetensors": self.train_checksum}
        for shard in self.shards:
            found[shard.name] = shard.checksum
        return found


def write_manifest(
    directory: Path, facts: StepFacts, train_checksum: str, shards: list[ShardEntry]
) -> None:
    """Write the manifest of a step whose files are complete."""
    known = msgspec.structs.asdict(facts)
    manifest = Manifest(**known, format=FORMAT, train_checksum=train_checksum, shards=shards)
    # not msgspec's own JSON, which has no word for not-a-number
    values = json.loads(json.dumps(msgspec.to_builtins(manifest)))
    values[_CHECKSUM] = _checksum_of(values)
    write_atomically(directory / MANIFEST_FILE, json.dumps(values, indent=1))


def _checksum_of(values: Mapping[str, Any]) -> str:
    """Return the checksum of what JSON has given, whatever its blanks were."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values).encode())


def read_manifest(directory: Path) -> Manifest:
    """Read what `write_manifest` wrote.

    Raises DataError: it is not there, is damaged, or belongs to another version."""
    file = directory / MANIFEST_FILE
    unreadable = (OSError, ValueError, RecursionError)
    with raised_as(DataError, "not a recorded step", unreadable, where=file):
        values = json.loads(file.read_text())
    found = None
    written = None
    if isinstance(values, dict):
        found = values.get("format")
        written = values.pop(_CHECKSUM, None)
    if found != FORMAT:
        raise DataError(
            f"sample store format {found!r}, this version reads {FORMAT}",
            where=str(directory),
            remedy="read it with the version that wrote it, or delete the step",
        )
    with raised_as(DataError, "not a recorded step", (msgspec.ValidationError,), where=file):
        manifest = msgspec.convert(values, Manifest)
    if written not in (None, _checksum_of(values)):
        raise DataError(
            f"{MANIFEST_FILE} is not as it was written: its checksum differs",
            where=str(file),
            remedy="delete the step; it is sampled anew",
        )
    return manifest


def is_recorded(directory: Path) -> bool:
    """Whether the step is there; it gets its name when it is whole."""
    return (directory / MANIFEST_FILE).exists()
