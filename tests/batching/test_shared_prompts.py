"""Which samples share a prompt: equal tokens, and equal routes where there are any."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.shared_prompts import shared_prompts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import Completion, Prompt, PromptImage, RolloutGroup, VersionSpan

SHAPE = RouteShape((0, 1), 2, 4)
PROMPT = (11, 12, 13)


def completion(routes: int | None = None, *, known_from: int = 0, version: int = 1) -> Completion:
    """Two tokens; routes: which experts, and from which row on they are known."""
    ids = np.array([21, 22], np.int32)
    spans = (VersionSpan(1, 0, 2),)
    if routes is None:
        return Completion(ids, np.zeros(2, np.float32), spans, "stop", "")
    experts = np.zeros((4, 2, 2), np.uint8)
    experts[..., 1] = routes
    route_spans = (VersionSpan(version, known_from, 4),)
    return Completion(ids, np.zeros(2, np.float32), spans, "stop", "", experts, route_spans)


def table(
    directory, groups: list[tuple[tuple[int, ...], list[Completion]]], *, shards=None, images=None
):
    """Groups of a prompt and completions; shards: of each group, by default one for all; images:
    of each group's prompt."""
    working = begin_step(directory)
    entries = []
    rows = []
    of_group = shards or [0] * len(groups)
    for shard in sorted(set(of_group)):
        here = [number for number, where in enumerate(of_group) if where == shard]
        recorded = []
        index = 0
        for number in here:
            tokens, completions = groups[number]
            prompt = Prompt("p", "d", "", tokens, "", images=images[number] if images else ())
            recorded.append(RolloutGroup(prompt, tuple(completions), 0))
            for _ in completions:
                rows.append(SampleRow(shard, index, len(rows), 0, 0.0))
                index += 1
        has_routes = any(one.routes is not None for group in recorded for one in group.completions)
        path = working / f"rollout-{shard}.safetensors"
        entries.append(write_shard(path, recorded, SHAPE if has_routes else None))
    finish_step(directory, entries, rows, StepFacts())
    return SampleTable(directory)


def prompts_of(samples: SampleTable) -> tuple[list[int], int]:
    found = shared_prompts(samples, np.arange(len(samples)))
    assert (
        found.paths.totals.tolist()
        == (samples.prompt_lengths + samples.completion_lengths).tolist()
    )
    return found.paths.pieces[:, 0].tolist(), found.num_split


@pytest.mark.parametrize("shards", [None, [0, 1, 0]])
def test_equal_tokens_are_shared_whatever_group_or_shard_they_are_of(tmp_path, shards):
    samples = table(
        tmp_path / "step_000001",
        [
            (PROMPT, [completion(), completion()]),
            (PROMPT, [completion()]),
            ((11, 12), [completion()]),
        ],
        shards=shards,
    )
    found, num_split = prompts_of(samples)
    lengths = samples.prompt_lengths.tolist()
    assert len(set(found)) == 2
    assert [number == found[lengths.index(3)] for number in found] == [n == 3 for n in lengths]
    assert num_split == 0


def test_equal_tokens_of_other_images_are_kept_apart(tmp_path):
    cat, dog = (PromptImage(letter * 64, 1, 1, 1) for letter in "ad")
    groups = [(PROMPT, [completion()])] * 3
    samples = table(tmp_path / "step_000001", groups, images=[(cat,), (dog,), (cat,)])
    assert prompts_of(samples) == ([0, 1, 0], 0)


def test_samples_with_other_routes_on_the_prompt_are_kept_apart(tmp_path):
    group = (PROMPT, [completion(1), completion(2), completion(1), completion(3)])
    found, num_split = prompts_of(table(tmp_path / "step_000001", [group]))
    assert found == [0, 1, 0, 2]
    assert num_split == 2


def test_so_are_samples_of_which_some_routes_are_missing_or_stale(tmp_path):
    late = completion(1, known_from=1)
    stale = completion(1, version=0)
    group = (PROMPT, [completion(1), late, stale, completion(1, known_from=1)])
    found, num_split = prompts_of(table(tmp_path / "step_000001", [group]))
    assert found == [0, 1, 2, 1]
    assert num_split == 2


def test_uses_count_the_samples_of_the_step(tmp_path):
    samples = table(
        tmp_path / "step_000001", [(PROMPT, [completion()] * 3), ((5,), [completion()])]
    )
    paths = shared_prompts(samples, np.array([0, 2, 3])).paths
    assert paths.uses.tolist() == [[2, 1], [2, 1], [1, 1]]
