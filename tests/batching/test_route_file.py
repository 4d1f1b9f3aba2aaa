"""Expert routes on disk: what is read is what was written, and damage is told by name."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching import route_file
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.errors import EngineError
from grpo_megatron.routing.shape import RouteShape, RouteStatus
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan

SHAPE = RouteShape(layers=(1, 2, 4), experts_per_token=2, num_experts=8)
NUM_LAYERS = 5


def routes_of(tokens: int, rng: np.random.Generator, experts: int = 8) -> np.ndarray:
    dtype = np.uint8 if experts <= 256 else np.uint16
    return np.argsort(rng.random((tokens, NUM_LAYERS, experts)), -1)[..., :2].astype(dtype)


def group_of(
    lengths: list[int],
    rng: np.random.Generator,
    *,
    num_prompt: int = 3,
    same_prompt: bool = True,
    experts: int = 8,
) -> RolloutGroup:
    first = routes_of(num_prompt, rng, experts)
    completions = []
    for length in lengths:
        routes = routes_of(num_prompt + length - 1, rng, experts)
        if same_prompt:
            routes[:num_prompt] = first
        completions.append(
            Completion(
                np.zeros(length, np.int32),
                np.zeros(length, np.float32),
                (VersionSpan(4, 0, length),),
                "stop",
                "",
                routes,
                (VersionSpan(4, 0, len(routes)),),
            )
        )
    prompt = Prompt("p", "d", "", (7,) * num_prompt, "")
    return RolloutGroup(prompt, tuple(completions), 0)


def write(directory: Path, groups: list[RolloutGroup], shape: RouteShape = SHAPE) -> SampleTable:
    shard = write_shard(begin_step(directory) / "rollout-0.safetensors", groups, shape)
    numbers = [g for g, group in enumerate(groups) for _ in group.completions]
    rows = [SampleRow(0, i, g, 0, 0.0) for i, g in enumerate(numbers)]
    finish_step(directory, [shard], rows, StepFacts())
    return SampleTable(directory)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
    layers=st.lists(st.sampled_from(SHAPE.layers), min_size=1, max_size=3, unique=True),
    block=st.sampled_from([7, 64, 1 << 16]),
    experts=st.sampled_from([8, 300]),
)
def test_routes_come_back(tmp_path, monkeypatch, groups, layers, block, experts):
    monkeypatch.setattr(route_file, "BLOCK_BYTES", block)
    rng = np.random.default_rng(1)
    shape = RouteShape(SHAPE.layers, 2, experts)
    made = [
        group_of(lengths, rng, num_prompt=n, same_prompt=same, experts=experts)
        for lengths, n, same in groups
    ]
    table = write(tmp_path / "step", made, shape)
    completions = [c for group in made for c in group.completions]
    for row, completion in enumerate(completions):
        ids, status = table.routes(row, layers, shape)
        np.testing.assert_array_equal(ids, completion.routes[:, layers].transpose(1, 0, 2))
        assert ids.dtype == shape.dtype
        assert not status.any()


def test_a_prompt_is_stored_once_per_group(tmp_path):
    rng = np.random.default_rng(0)
    table = write(tmp_path / "a", [group_of([4] * 10, rng, num_prompt=50)])
    size = (tmp_path / "a" / "rollout-0.routes").stat().st_size
    assert size == 3 * 2 * (50 + 10 * 3)
    assert len(table) == 10


def test_long_samples_cost_one_byte_a_choice(tmp_path):
    rng = np.random.default_rng(0)
    tokens = 4 * (2000 - 1) + 3
    write(tmp_path / "with", [group_of([2000] * 4, rng)])
    bare = group_of([2000] * 4, rng).completions
    shard = write_shard(
        begin_step(tmp_path / "without") / "rollout-0.safetensors",
        [RolloutGroup(Prompt("p", "d", "", (7,) * 3, ""), bare, 0)],
    )
    finish_step(
        tmp_path / "without", [shard], [SampleRow(0, i, 0, 0, 0.0) for i in range(4)], StepFacts()
    )

    def size(directory: Path) -> int:
        return sum(f.stat().st_size for f in directory.iterdir())

    extra = size(tmp_path / "with") - size(tmp_path / "without")
    assert tokens * 3 * 2 <= extra <= 1.01 * tokens * 3 * 2


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_one_flipped_byte_is_found_and_only_its_block_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(route_file, "BLOCK_BYTES", 64)
    groups = [group_of([9, 20], np.random.default_rng(0)) for _ in range(3)]
    write(tmp_path / "step", groups)
    flip(tmp_path / "step" / "rollout-0.routes", 70)
    table = SampleTable(tmp_path / "step")
    bad = [table.routes(row, SHAPE.layers, SHAPE)[1] == RouteStatus.CORRUPT for row in range(6)]
    assert bad[1].any() and not any(b.any() for b in bad[2:])
    assert sum(b.sum() for b in bad) * 2 <= 64 + 2 * 2


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_short_or_missing_file_is_corrupt_from_there_on(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(route_file, "BLOCK_BYTES", 64)
    write(tmp_path / "step", [group_of([9, 20], np.random.default_rng(0)) for _ in range(3)])
    path = tmp_path / "step" / "rollout-0.routes"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-70])
    status = [
        SampleTable(tmp_path / "step").routes(row, SHAPE.layers, SHAPE)[1] for row in range(6)
    ]
    assert (status[0] == RouteStatus.CORRUPT).all() == (damage == "gone")
    assert (status[5] == RouteStatus.CORRUPT).any()


def test_missing_and_stale_rows_are_told_apart(tmp_path):
    group = group_of([6, 6, 6], np.random.default_rng(0))
    whole, dropped, stale = group.completions
    versions = (VersionSpan(4, 0, 2), VersionSpan(5, 2, 6))
    make = functools.partial(Completion, whole.token_ids, whole.logprobs, versions, "stop", "")
    rows = 3 + 6 - 1
    completions = (
        make(whole.routes, (VersionSpan(4, 0, 4), VersionSpan(5, 4, rows))),
        make(dropped.routes, (VersionSpan(4, 0, 4), VersionSpan(5, 6, rows))),
        make(stale.routes, (VersionSpan(5, 0, rows),)),
    )
    table = write(tmp_path / "step", [RolloutGroup(group.prompt, completions, 0)])
    found = [table.routes(row, (2,), SHAPE)[1][0].tolist() for row in range(3)]
    assert found[0] == [0] * rows
    assert found[1] == [0] * 4 + [RouteStatus.MISSING] * 2 + [0] * 2
    assert found[2] == [RouteStatus.STALE] * 4 + [0] * 4


def test_no_routes_at_all_are_missing(tmp_path):
    completion = Completion(
        np.zeros(3, np.int32), np.zeros(3, np.float32), (VersionSpan(0, 0, 3),), "stop", ""
    )
    table = write(
        tmp_path / "s", [RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (completion,), 0)]
    )
    assert (table.routes(0, SHAPE.layers, SHAPE)[1] == RouteStatus.MISSING).all()


def test_a_sample_without_routes_does_not_move_those_beside_it(tmp_path):
    group = group_of([4, 6, 5], np.random.default_rng(0))
    first, second, third = group.completions
    bare = replace(second, routes=None, route_versions=())
    table = write(tmp_path / "s", [RolloutGroup(group.prompt, (first, bare, third), 0)] * 2)
    for row, completion in enumerate([first, bare, third] * 2):
        ids, status = table.routes(row, SHAPE.layers, SHAPE)
        if completion is bare:
            assert not ids.any() and (status == RouteStatus.MISSING).all()
        else:
            expected = completion.routes[:, list(SHAPE.layers)].transpose(1, 0, 2)
            np.testing.assert_array_equal(ids, expected)
            assert not status.any()


def test_impossible_experts_are_invalid(tmp_path):
    group = group_of([6], np.random.default_rng(0))
    group.completions[0].routes[2, 1] = (3, 3)
    group.completions[0].routes[4, 2] = (3, 8)
    status = write(tmp_path / "step", [group]).routes(0, SHAPE.layers, SHAPE)[1]
    assert np.argwhere(status == RouteStatus.INVALID).tolist() == [[0, 2], [1, 4]]


def test_another_models_routes_are_not_replayed(tmp_path):
    table = write(tmp_path / "step", [group_of([6], np.random.default_rng(0))])
    for other in (
        RouteShape((1, 2), 2, 8),
        RouteShape(SHAPE.layers, 3, 8),
        RouteShape(SHAPE.layers, 2, 16),
    ):
        ids, status = table.routes(0, other.layers, other)
        assert (status == RouteStatus.MISSHAPEN).all() and ids.shape[2] == other.experts_per_token


def test_an_engine_with_another_model_is_refused(tmp_path):
    with pytest.raises(EngineError, match="another model"):
        write(
            tmp_path / "step", [group_of([6], np.random.default_rng(0))], RouteShape((1, 7), 2, 8)
        )
