"""Write a batch of scored rollouts as one immutable step of the sample store."""

import bisect
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.manifest import StepFacts, is_recorded
from grpo_megatron.batching.store import SampleRow, begin_step, finish_step, write_shard
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.run import RunConfig
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup

Decode = Callable[[Sequence[int]], str]


def record_step(
    directory: Path,
    groups: Sequence[ScoredGroup],
    num_updates: int,
    facts: StepFacts,
    decode: Decode,
    route_shape: RouteShape | None = None,
    teacher_logprobs: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a step, one shard a replica, in prompt order: equal rollouts give equal files. Each of
    `num_updates` optimizer steps trains a contiguous, nearly equal part.

    route_shape: of the experts' routes, where they are recorded; teacher_logprobs: as
    `ServedTeachers.answers` gives them."""
    working = begin_step(directory)
    replicas = sorted({scored.group.replica for scored in groups})
    of_shards: list[list[RolloutGroup]] = [[] for _ in replicas]
    num_in_shard = [0] * len(replicas)
    rows = []
    for number, scored in enumerate(groups):
        group = scored.group
        shard = replicas.index(group.replica)
        of_shards[shard].extend(group.by_answered_ids())
        for reward, completion in zip(scored.rewards, group.completions, strict=True):
            row = SampleRow(
                shard=shard,
                index=num_in_shard[shard],
                group=number,
                update=number * min(num_updates, len(groups)) // len(groups),
                reward=float(reward),
                domain=facts.domains.index(group.prompt.domain),
                truncated=completion.truncated,
            )
            rows.append(row)
            num_in_shard[shard] += 1
    shards = []
    for replica, parts in zip(replicas, of_shards, strict=True):
        shards.append(write_shard(working / f"rollout-{replica}.safetensors", parts, route_shape))
    finish_step(
        directory,
        shards,
        rows,
        facts,
        _components(groups),
        _steps(groups, decode),
        teacher_logprobs,
    )


def _components(groups: Sequence[ScoredGroup]) -> dict[str, np.ndarray]:
    """Rewards by component over all samples, NaN where a group's domain has no such one."""
    names: dict[str, None] = {}  # ordered
    for group in groups:
        names.update(dict.fromkeys(group.components))
    found = {}
    for name in names:
        parts = []
        for group in groups:
            skipped = np.full(len(group.rewards), np.nan)
            parts.append(np.asarray(group.components.get(name, skipped), np.float64))
        found[name] = np.concatenate(parts)
    return found


def _steps(groups: Sequence[ScoredGroup], decode: Decode) -> list[tuple[int, int, float]]:
    """Step rewards as (row, last token of the step, reward); steps without a token are left out."""
    found = []
    row = -1
    for group in groups:
        for sample, completion in enumerate(group.group.completions):
            row += 1
            if not group.steps or not len(completion.token_ids):
                continue
            for end, reward in group.steps[sample]:
                found.append((row, token_at(completion.token_ids, end, decode), reward))
    return found


def token_at(token_ids: np.ndarray, end: int, decode: Decode) -> int:
    """The first token whose text reaches place `end`, else the last token."""

    def text_length(token: int) -> int:
        return len(decode(token_ids[: token + 1].tolist()))

    found = bisect.bisect_left(range(len(token_ids)), end, key=text_length)
    return min(found, len(token_ids) - 1)


def record_completions(
    directory: Path, samples: Sequence[tuple[int, Prompt, Completion]], name: str = "completions"
) -> None:
    """Write (optimizer step, prompt, completion) for the trainer to compute, one sample each."""
    groups = []
    rows = []
    for number, (update, prompt, completion) in enumerate(samples):
        groups.append(RolloutGroup(prompt, (completion,), 0))
        rows.append(SampleRow(shard=0, index=number, group=number, update=update, reward=0.0))
    shard = write_shard(begin_step(directory) / f"{name}.safetensors", groups)
    finish_step(directory, [shard], rows, StepFacts())


def starting_steps(config: RunConfig, run_dir: RunDir) -> list[int]:
    """Steps from which the run can be computed again, ascending: those with a checkpoint, and step
    0 where its weights are what the run was given (after a cold start they are not)."""
    steps = complete_steps(run_dir.checkpoints)
    if config.cold_start is None and 0 not in steps:
        steps.insert(0, 0)
    return steps


def prune_store(store: Path, starts: Sequence[int], keep: int) -> None:
    """Remove recorded steps that neither a resume nor a replay needs: kept are those since the
    newest of `starts` (ascending), and the first `keep` after each of the others."""
    if not starts:
        return
    for recorded, path in steps_in(store):
        before = [start for start in starts if start <= recorded]
        since_the_newest = bool(before) and before[-1] == starts[-1]
        soon_after_one = bool(before) and recorded < before[-1] + keep
        if not since_the_newest and not soon_after_one:
            shutil.rmtree(path, ignore_errors=True)


def drop_disconnected(store: Path, step: int) -> None:
    """Remove recorded steps after a gap that begins at or after `step`: a step in the gap will be
    sampled anew, and what was recorded later came from another policy."""
    while is_recorded(store / f"step_{step:06d}"):
        step += 1
    for recorded, path in steps_in(store):
        if recorded > step:
            shutil.rmtree(path, ignore_errors=True)


def steps_in(store: Path) -> list[tuple[int, Path]]:
    """List step and directory of what is recorded, not of what was never finished."""
    found = []
    for path in store.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            found.append((int(number), path))
    return found
