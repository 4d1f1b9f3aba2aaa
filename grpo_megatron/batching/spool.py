"""Sampled completions on their way into the store: written where they are sampled, known by record.

    rollouts/1/000017/rollout-0-003.safetensors   tokens and log-probs of one call's prompts
    rollouts/1/000017/rollout-0-003.routes        their experts, where recorded
    rollouts/1/000017/rollout-0-003.texts         their texts, one after the other, in UTF-8

A rollout worker writes a shard in the format of the store, durably, and then reports it. Whoever
asked has a `StoredCompletion` for each sample, and links the shards of what is trained into the
step's directory (`link_shard`). A shard that nobody reported is never read. The directory of a call
goes when its last sample is forgotten."""

import json
import math
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from grpo_megatron.batching.manifest import ShardEntry
from grpo_megatron.batching.sequences import shard_order
from grpo_megatron.batching.store import write_shard
from grpo_megatron.errors import SetupError, raised_as
from grpo_megatron.file_part import FilePart
from grpo_megatron.files import link_or_copy, sync
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import (
    Completion,
    KeptCounts,
    Prompt,
    RolloutGroup,
    StoredCompletion,
    Turn,
    VersionSpan,
)

TurnRecord = tuple[int, int, float | None, str, bool]
"""`Turn`; a reward that is not there is None, which JSON has a word for."""


class SampleRecord(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a shard, in its order: a sequence."""

    num_tokens: int
    finish_reason: str
    versions: list[tuple[int, int, int]]
    """(version, start, end) each."""
    kept: tuple[int, int, int] | None
    """`KeptCounts`."""
    text_start: int
    """Of its text among those of the shard, in bytes."""
    text_size: int
    turns: list[TurnRecord] = []
    outcome: float | None = None
    """`Completion.outcome`; None: none."""
    own_prompt: tuple[int, int] | None = None
    """Where among the prompts of the shard the tokens are that it answers, start and number, if
    they are not those of its group's prompt."""
    outcome_metrics: dict[str, float] = {}
    """`Completion.outcome_metrics`, without those that are not finite."""


class ShardReport(msgspec.Struct, frozen=True):
    """A shard that is on the disk."""

    entry: ShardEntry
    """Its line of a step's manifest."""
    tokens_start: int
    """Where in the file its completions' token ids begin, in bytes."""
    samples: list[SampleRecord]
    prompts_start: int = 0
    """Where in the file the token ids of its prompts begin, in bytes."""
    sequences: list[list[int]] | None = None
    """`ShardOrder.places` where completions have earlier sequences or other prompts; None: every
    sample is a completion."""


class SpoolDirectory:
    """A new directory, which is removed with the last reference to this object.

    Raises SetupError where it cannot be made."""

    def __init__(self, path: Path):
        with raised_as(SetupError, "cannot write rollouts", OSError, where=path):
            path.mkdir(parents=True)
        self.path = path
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


class StoredShard:
    """A reported shard in its directory, which it keeps there."""

    def __init__(self, directory: SpoolDirectory, report: ShardReport):
        self._directory = directory
        self.entry = report.entry
        self.path = directory.path / report.entry.name
        self._tokens_start = report.tokens_start
        self._prompts_start = report.prompts_start
        self._samples = report.samples
        self._places = report.sequences

    def completions(self) -> list[StoredCompletion]:
        """Return all completions, in order, with their earlier sequences."""
        samples = self._sequences()
        if self._places is None:
            return samples
        found = []
        for *earlier, last in self._places:
            sequences = tuple(samples[place] for place in earlier)
            found.append(replace(samples[last], earlier=sequences))
        return found

    def _sequences(self) -> list[StoredCompletion]:
        """Return all samples, in order."""
        texts = str(_texts_file(self.path))
        found = []
        token = 0
        for index, sample in enumerate(self._samples):
            kept = None
            if sample.kept is not None:
                kept = KeptCounts(*sample.kept)
            prompt_ids = None
            if sample.own_prompt is not None:
                start, num_prompt = sample.own_prompt
                at = self._prompts_start + 4 * start
                prompt_ids = FilePart(str(self.path), at, 4 * num_prompt)
            tokens_start = self._tokens_start + 4 * token
            completion = StoredCompletion(
                shard=self,
                index=index,
                num_tokens=sample.num_tokens,
                versions=tuple(VersionSpan(*span) for span in sample.versions),
                finish_reason=sample.finish_reason,
                stored_token_ids=FilePart(str(self.path), tokens_start, 4 * sample.num_tokens),
                stored_text=FilePart(texts, sample.text_start, sample.text_size),
                kept_counts=kept,
                turns=tuple(_turn(record) for record in sample.turns),
                outcome=_number(sample.outcome),
                outcome_metrics=sample.outcome_metrics,
                stored_prompt_ids=prompt_ids,
            )
            found.append(completion)
            token += sample.num_tokens
        return found

    def groups(
        self, prompts: Sequence[Prompt], sizes: Sequence[int], replicas: Sequence[int]
    ) -> list[RolloutGroup[StoredCompletion]]:
        """Return the completions as groups of these prompts, sizes and engines, in the order in
        which they were written."""
        completions = self.completions()
        groups = []
        first = 0
        for prompt, size, replica in zip(prompts, sizes, replicas, strict=True):
            of_prompt = tuple(completions[first : first + size])
            groups.append(RolloutGroup(prompt, of_prompt, replica))
            first += size
        return groups


def spool_groups(
    path: Path, groups: Sequence[RolloutGroup[Completion]], route_shape: RouteShape | None = None
) -> ShardReport:
    """Write the groups as a new shard `path` with their texts; on the disk when this returns.

    Raises SetupError: the disk is full or not writable, or another writer has this shard's name;
    EngineError: routes are not those of a model of `route_shape`, or the record of a sample
    contradicts itself."""
    with raised_as(
        SetupError,
        "cannot write rollouts",
        OSError,
        where=path,
        remedy="free space, or choose another runs_dir=…",
    ):
        texts: list[bytes] = []
        samples: list[SampleRecord] = []
        text_start = 0
        prompt_start = 0
        order = shard_order(groups)
        for part, has_own_prompt in zip(order.groups, order.has_own_prompt, strict=True):
            own_prompt = None
            num_prompt = len(part.prompt.token_ids)
            if has_own_prompt:
                own_prompt = (prompt_start, num_prompt)
            for sequence in part.completions:
                text = sequence.text.encode("utf-8", "surrogatepass")
                texts.append(text)
                samples.append(_record(sequence, text_start, len(text), own_prompt))
                text_start += len(text)
            prompt_start += num_prompt
        _texts_file(path).write_bytes(b"".join(texts))
        entry = write_shard(path, groups, route_shape, new=True)
        sync(path.parent)
        places = None
        if order.places != [[number] for number in range(len(samples))]:
            places = order.places
        return ShardReport(
            entry=entry,
            tokens_start=_column_start(path, "completion_ids"),
            samples=samples,
            prompts_start=_column_start(path, "prompt_ids"),
            sequences=places,
        )


def store_groups(
    path: Path, groups: Sequence[RolloutGroup[Completion]], route_shape: RouteShape | None = None
) -> list[RolloutGroup[StoredCompletion]]:
    """Write groups of this process as the one shard of a new directory `path`; returns them as they
    are stored. Errors as of `spool_groups`."""
    directory = SpoolDirectory(path)
    report = spool_groups(path / "rollout-0-000.safetensors", groups, route_shape)
    shard = StoredShard(directory, report)
    return shard.groups(
        [group.prompt for group in groups],
        [len(group.completions) for group in groups],
        [group.replica for group in groups],
    )


def link_shard(shard: StoredShard, path: Path) -> ShardEntry:
    """Give a shard and its routes another name, `path`, as one of a step's directory; the bytes are
    copied only where the file system has no hard links. Returns its entry there."""
    link_or_copy(shard.path, path)
    if shard.entry.routes is not None:
        link_or_copy(shard.path.with_suffix(".routes"), path.with_suffix(".routes"))
    return msgspec.structs.replace(shard.entry, name=path.name)


def _texts_file(shard: Path) -> Path:
    return shard.with_suffix(".texts")


def _record(
    sequence: Completion, text_start: int, text_size: int, own_prompt: tuple[int, int] | None
) -> SampleRecord:
    versions = [(span.version, span.start, span.end) for span in sequence.versions]
    turns: list[TurnRecord] = []
    for turn in sequence.turns:
        turns.append((turn.start, turn.end, _known(turn.reward), turn.state, turn.spoilt))
    outcome_metrics = {}
    for name, value in sequence.outcome_metrics.items():
        if math.isfinite(value):
            outcome_metrics[name] = float(value)
    return SampleRecord(
        num_tokens=sequence.num_tokens,
        finish_reason=sequence.finish_reason,
        versions=versions,
        kept=sequence.kept_counts,
        text_start=text_start,
        text_size=text_size,
        turns=turns,
        outcome=_known(sequence.outcome),
        own_prompt=own_prompt,
        outcome_metrics=outcome_metrics,
    )


def _turn(record: TurnRecord) -> Turn:
    start, end, reward, state, spoilt = record
    return Turn(start, end, _number(reward), state, spoilt)


def _known(value: float) -> float | None:
    """None for not-a-number."""
    if math.isnan(value):
        return None
    return value


def _number(value: float | None) -> float:
    """Return what `_known` was given."""
    if value is None:
        return math.nan
    return value


def _column_start(path: Path, name: str) -> int:
    """Return where a column begins in a safetensors file, in bytes."""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    start: int = header[name]["data_offsets"][0]
    return 8 + header_size + start
