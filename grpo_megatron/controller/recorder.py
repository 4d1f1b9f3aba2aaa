"""Scored rollouts become one immutable step of the sample store, without being read."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.image_folder import IMAGES, ImageFolder
from grpo_megatron.batching.manifest import StepFacts, is_recorded
from grpo_megatron.batching.sequences import shard_order
from grpo_megatron.batching.spool import StoredShard, link_shard
from grpo_megatron.batching.store import (
    SampleRow,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.run import RunConfig
from grpo_megatron.files import remove_directory, sync
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    ScoredGroup,
    count_policy_tokens,
)

Decode = Callable[[Sequence[int]], str]
_NO_CHARACTER = "\ufffd"
"""What tokens decode to that are parts of a character."""


def record_step(
    directory: Path,
    groups: Sequence[ScoredGroup],
    num_updates: int,
    facts: StepFacts,
    decode: Decode,
    teacher_logprobs: Mapping[str, np.ndarray] | None = None,
    *,
    together: bool = False,
    images: ImageFolder | None = None,
) -> None:
    """Make a step of the shards in which the groups lie, in the order in which the groups come:
    equal rollouts give equal files. Each of `num_updates` optimizer steps trains a contiguous,
    nearly equal part. A shard may hold samples that no row names: those of groups that are not
    trained.

    teacher_logprobs: as `ServedTeachers.answers` gives them; together: all answers of a group are
    one episode, which no micro-batch splits; images: where the files of the prompts' images are.
    Raises DataError where one of them is missing."""
    working = begin_step(directory)
    numbers: dict[StoredShard, int] = {}
    rows = []
    episode = 0
    for number, scored in enumerate(groups):
        group = scored.group
        for reward, completion in zip(scored.rewards, group.completions, strict=True):
            for sequence in completion.sequences:
                shard = sequence.shard
                assert isinstance(shard, StoredShard)  # what was sampled is spooled first
                row = SampleRow(
                    shard=numbers.setdefault(shard, len(numbers)),
                    index=sequence.index,
                    group=number,
                    update=number * min(num_updates, len(groups)) // len(groups),
                    reward=float(reward),
                    domain=facts.domains.index(group.prompt.domain),
                    truncated=completion.truncated,
                    prompt_length=sequence.prompt_length(group.prompt),
                    completion_length=sequence.num_tokens,
                    policy_length=count_policy_tokens(sequence.turns, sequence.num_tokens),
                    episode=episode,
                )
                rows.append(row)
            if not together:
                episode += 1
        if together:
            episode += 1
    entries = []
    for shard, number in numbers.items():
        entries.append(link_shard(shard, working / f"rollout-{number}.safetensors"))
    _link_images([group.group.prompt for group in groups], images, working)
    sync(working)
    finish_step(
        directory,
        entries,
        rows,
        facts,
        _components(groups),
        _steps(groups, decode),
        teacher_logprobs,
    )


def _link_images(prompts: Sequence[Prompt], images: ImageFolder | None, working: Path) -> None:
    """Link the image files of prompts into a step's directory."""
    digests: set[str] = set()
    for prompt in prompts:
        digests.update(image.digest for image in prompt.images)
    if digests:
        assert images is not None  # of a model that sees
        images.link_to(ImageFolder(working / IMAGES), digests)


def _components(groups: Sequence[ScoredGroup]) -> dict[str, np.ndarray]:
    """Return the rewards of each component over all rows, float64 [N] by name; NaN where the domain
    of a group does not have the component."""
    names: dict[str, None] = {}  # ordered
    for group in groups:
        names.update(dict.fromkeys(group.components))
    found = {}
    for name in names:
        parts = []
        for group in groups:
            skipped = np.full(len(group.rewards), np.nan)
            of_completions = np.asarray(group.components.get(name, skipped), np.float64)
            parts.append(np.repeat(of_completions, _num_sequences(group)))
        found[name] = np.concatenate(parts)
    return found


def _num_sequences(group: ScoredGroup) -> list[int]:
    """Return how many rows each completion of a group has, [G]."""
    return [len(completion.sequences) for completion in group.group.completions]


def _steps(groups: Sequence[ScoredGroup], decode: Decode) -> list[tuple[int, int, float]]:
    """Return step rewards as (row, last token of the step, reward); steps without a token are left
    out.

    The steps of an episode are in the text of its last turn, and so in its last row."""
    found = []
    row = -1
    for group in groups:
        for sample, completion in enumerate(group.group.completions):
            row += len(completion.sequences)
            if not group.steps or not completion.num_tokens:
                continue
            first = completion.answer_start
            answer_ids = completion.token_ids[first:]
            for end, reward in group.steps[sample]:
                found.append((row, first + token_at(answer_ids, end, decode), reward))
    return found


def token_at(token_ids: np.ndarray, end: int, decode: Decode) -> int:
    """Return the first token up to which the text has its first `end` characters, whole; the last
    one where the text is shorter."""
    text = decode(token_ids.tolist())

    def has_them(token: int) -> bool:
        # A character of several tokens is another one until it has all of them.
        decoded = decode(token_ids[: token + 1].tolist())
        return len(decoded) >= end and decoded[:end] == text[:end]

    def has_same_text(token: int) -> bool:
        # Of a character that was cut the first token already stands for all; one that writes
        # nothing, such as the end of a turn, is no part of it.
        writes_something = decode(token_ids[token : token + 1].tolist()) != ""
        return writes_something and decode(token_ids[: token + 1].tolist()) == text[:end]

    found = bisect.bisect_left(range(len(token_ids)), True, key=has_them)
    token = min(found, len(token_ids) - 1)
    if text[:end].endswith(_NO_CHARACTER):
        while token + 1 < len(token_ids) and has_same_text(token + 1):
            token += 1
    return token


def record_completions(
    directory: Path,
    samples: Sequence[tuple[int, Prompt, Completion]],
    engine: str = "",
    images: ImageFolder | None = None,
    domains: Sequence[str] = (),
) -> None:
    """Write (optimizer step, prompt, completion) for the trainer to compute, one sample each.

    engine: the name of the one that answered, if one did; images: as of `record_step`; domains: of
    the recipe, where rows have the number of their prompt's."""
    groups = []
    domain_numbers = []
    for _, prompt, completion in samples:
        groups.append(RolloutGroup(prompt, (completion,), 0))
        if domains:
            domain_numbers.append(domains.index(prompt.domain))
        else:
            domain_numbers.append(0)
    rows = []
    places = shard_order(groups).places
    for number, ((update, _, _), of_sample) in enumerate(zip(samples, places, strict=True)):
        for place in of_sample:
            row = SampleRow(
                shard=0,
                index=place,
                group=number,
                update=update,
                reward=0.0,
                domain=domain_numbers[number],
                episode=number,
            )
            rows.append(row)
    working = begin_step(directory)
    _link_images([group.prompt for group in groups], images, working)
    shard = write_shard(working / "completions.safetensors", groups)
    engines = []
    if engine:
        engines = [engine] * len(groups)
    facts = StepFacts(domains=list(domains), engines=engines)
    finish_step(directory, [shard], rows, facts)


def starting_steps(config: RunConfig, run_dir: RunDir) -> list[int]:
    """Return the steps from which the run can be computed again, ascending: those with a
    checkpoint, and step 0 where its weights are what the run was given (after a cold start they are
    not)."""
    steps = complete_steps(run_dir.checkpoints)
    if config.cold_start is None and 0 not in steps:
        steps.insert(0, 0)
    return steps


def prune_store(store: Path, starts: Sequence[int], keep: int, *, present: int) -> None:
    """Remove recorded steps that neither a resume nor a replay needs: kept are those since the
    newest of `starts` (ascending), and the first `keep` after each of the others.

    present: the step that is trained next; it and what was recorded ahead of it stay."""
    if not starts:
        return
    for recorded, path in steps_in(store):
        if recorded >= present:
            continue
        before = [start for start in starts if start <= recorded]
        since_the_newest = bool(before) and before[-1] == starts[-1]
        soon_after_one = bool(before) and recorded < before[-1] + keep
        if not since_the_newest and not soon_after_one:
            remove_directory(path)


def prune_images(images: Path, store: Path) -> None:
    """Remove the files of a run's images that no recorded step has. A run that goes on keeps those
    of its prompts again when it reads them."""
    if not images.exists():
        return
    recorded: set[str] = set()
    for _, path in steps_in(store):
        recorded.update(file.name for file in path.glob(f"{IMAGES}/*"))
    for file in list(images.iterdir()):
        if file.name not in recorded:
            file.unlink()


def drop_disconnected(store: Path, step: int) -> None:
    """Remove recorded steps after a gap that begins at or after `step`: a step in the gap will be
    sampled anew, and what was recorded later came from another policy."""
    while is_recorded(store / f"step_{step:06d}"):
        step += 1
    for recorded, path in steps_in(store):
        if recorded > step:
            remove_directory(path)


def steps_in(store: Path) -> list[tuple[int, Path]]:
    """List step and directory of what is recorded, not of what was never finished."""
    found = []
    for path in store.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit():
            found.append((int(number), path))
    return found
