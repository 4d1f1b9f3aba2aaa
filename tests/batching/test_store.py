"""The sample store: what is read is what was written, or an error says what is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.columns import read_columns, write_columns
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    StepDomain,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.errors import DataError
from grpo_megatron.routing.shape import RouteShape, RouteStatus
from grpo_megatron.types import Completion, Prompt, RolloutGroup, SamplingMask, VersionSpan

FILES = ["manifest.json", "rollout-0.safetensors", "rollout-1.safetensors", "train.safetensors"]


def completion_of(length: int, rng: np.random.Generator) -> Completion:
    """Tokens of up to two weight versions."""
    cut = int(rng.integers(0, length + 1))
    spans = tuple(
        VersionSpan(version, start, end)
        for version, start, end in ((4, 0, cut), (5, cut, length))
        if end > start
    )
    return Completion(
        rng.integers(0, 1 << 17, length).astype(np.int32),
        -rng.random(length, np.float32),
        spans,
        "stop",
        "",
    )


def write(directory, lengths: list[list[list[int]]]):
    """`lengths[shard][group][sample]`; rows are in reverse order of the shards' samples."""
    rng, working, shards, groups, rows = np.random.default_rng(0), begin_step(directory), [], [], []
    for shard, of_groups in enumerate(lengths):
        mine, sample = [], 0
        for of_samples in of_groups:
            prompt = Prompt("p", "d", "", tuple(rng.integers(0, 99, 1 + len(groups)).tolist()), "")
            group = RolloutGroup(prompt, tuple(completion_of(n, rng) for n in of_samples), shard)
            mine.append(group)
            for completion in group.completions:
                rows.append(
                    (
                        SampleRow(
                            shard,
                            sample,
                            len(groups),
                            len(groups) % 2,
                            float(rng.random()),
                            sample % 2,
                            sample % 3 == 0,
                        ),
                        prompt,
                        completion,
                    )
                )
                sample += 1
            groups.append(group)
        shards.append(write_shard(working / f"rollout-{shard}.safetensors", mine))
    rows.reverse()
    finish_step(directory, shards, [row for row, _, _ in rows], StepFacts(step=7))
    return rows


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=3),
        min_size=1,
        max_size=3,
    ).filter(any)
)
def test_round_trip(tmp_path, lengths):
    written = write(tmp_path / "step_000007", lengths)
    table = SampleTable(tmp_path / "step_000007")
    assert len(table) == len(written) and table.manifest.step == 7
    for i, (row, prompt, completion) in enumerate(written):
        ids, logprobs = table.completion(i)
        np.testing.assert_array_equal(ids, completion.token_ids)
        np.testing.assert_array_equal(logprobs, completion.logprobs)
        np.testing.assert_array_equal(table.prompt_ids(i), prompt.token_ids)
        np.testing.assert_array_equal(
            table.versions(i),
            np.concatenate([np.full(s.end - s.start, s.version) for s in completion.versions]),
        )
        assert table.prompt_lengths[i] == len(prompt.token_ids)
        assert table.completion_lengths[i] == len(completion.token_ids)
        assert (table.group[i], table.update[i]) == (row.group, row.update)
        assert (table.reward[i], table.domain[i], table.truncated[i]) == (
            row.reward,
            row.domain,
            row.truncated,
        )


def test_kept_sets_of_truncated_sampling(tmp_path):
    """Ragged, also over shards; a completion without sets has empty ones; no column without any."""
    rng, written = np.random.default_rng(0), []
    working, shards = begin_step(tmp_path / "step_000001"), []
    for shard, lengths in enumerate([[3, 1, 4], [2, 5]]):
        groups = []
        for length in lengths:
            offsets = np.cumsum([0, *rng.integers(0, 4, length)])
            kept = SamplingMask(rng.integers(0, 99, offsets[-1]).astype(np.int32), offsets)
            written.append(None if len(written) == 2 else kept)
            completion = replace(completion_of(length, rng), kept=written[-1])
            groups.append(RolloutGroup(Prompt("p", "d", "", (1,), ""), (completion,), 0))
        shards.append(write_shard(working / f"rollout-{shard}.safetensors", groups))
    rows = [SampleRow(shard, i, 0, 0, 0.0) for shard, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    finish_step(tmp_path / "step_000001", shards, rows, StepFacts())
    table = SampleTable(tmp_path / "step_000001")
    for row, kept in enumerate(written):
        found = table.kept(row)
        assert found.ids.dtype == np.int32
        np.testing.assert_array_equal(found.ids, [] if kept is None else kept.ids)
        np.testing.assert_array_equal(found.offsets, [0] * 5 if kept is None else kept.offsets)


def test_a_completion_without_sets_does_not_move_those_after_it(tmp_path):
    rng, completions = np.random.default_rng(1), []
    masks = [None, SamplingMask(np.array([5, 6, 7], np.int32), np.array([0, 2, 3])), None]
    masks.append(SamplingMask(np.array([8], np.int32), np.array([0, 0, 1])))
    for mask in masks:
        completions.append(replace(completion_of(2, rng), kept=mask))
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), tuple(completions), 0)
    directory = tmp_path / "step_000001"
    shard = write_shard(begin_step(directory) / "rollout-0.safetensors", [group])
    finish_step(directory, [shard], [SampleRow(0, i, 0, 0, 0.0) for i in range(4)], StepFacts())
    table = SampleTable(directory)
    found = [(table.kept(row).ids.tolist(), table.kept(row).offsets.tolist()) for row in range(4)]
    assert found == [([], [0, 0, 0]), ([5, 6, 7], [0, 2, 3]), ([], [0, 0, 0]), ([8], [0, 0, 1])]


def test_components_steps_and_columns_of_teachers_come_back_under_their_names(tmp_path):
    directory = tmp_path / "step_000001"
    rng = np.random.default_rng(2)
    group = RolloutGroup(
        Prompt("p", "d", "", (1,), ""), (completion_of(3, rng), completion_of(2, rng)), 0
    )
    shard = write_shard(begin_step(directory) / "rollout-0.safetensors", [group])
    components = {"right": np.array([1.0, np.nan]), "short": np.array([0.25, 0.5])}
    of_teacher = {"0/ids": np.arange(10, dtype=np.int32).reshape(5, 2), "0/rows": np.array([0, 1])}
    finish_step(
        directory,
        [shard],
        [SampleRow(0, 0, 0, 0, 1.0), SampleRow(0, 1, 0, 0, 0.5)],
        StepFacts(),
        components=components,
        steps=[(0, 1, 0.5), (0, 2, -1.0), (1, 1, 2.0)],
        teacher_logprobs=of_teacher,
    )
    table = SampleTable(directory)
    for found, expected in (
        (table.components, components),
        (table.teacher_logprobs, of_teacher),
    ):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)
            assert found[name].dtype == values.dtype
    assert [column.tolist() for column in table.steps] == [[0, 0, 1], [1, 2, 1], [0.5, -1.0, 2.0]]


def test_samples_of_a_shard_without_routes_have_none_of_any_shape(pristine):
    table = SampleTable(pristine)
    shape = RouteShape(layers=(1, 3), num_experts=8, experts_per_token=2)
    ids, status = table.routes(0, (3,), shape)
    tokens = int(table.prompt_lengths[0] + table.completion_lengths[0]) - 1
    assert table.route_shapes == []
    assert ids.shape == (1, tokens, 2) and not ids.any()
    assert (status == RouteStatus.MISSING).all() and status.shape == (1, tokens)


def test_untruncated_samples_have_no_sets(pristine):
    assert SampleTable(pristine).kept(0) is None
    assert not any(
        name.startswith("kept") for name in read_columns(pristine / "rollout-0.safetensors")
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("store") / "step_000001"
    write(directory, [[[3, 5], [2, 2]], [[4, 4]]])
    return directory


@pytest.fixture
def step(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "step_000001")


def test_nothing_else_is_left_beside_a_finished_step(pristine):
    assert sorted(path.name for path in pristine.iterdir()) == FILES
    assert [path.name for path in pristine.parent.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
def test_one_changed_byte_is_found(step, name, position):
    data = bytearray((step / name).read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    (step / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is missing or its checksum differs"):
        SampleTable(step)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(step, name):
    (step / name).unlink()
    with pytest.raises(DataError, match=name):
        SampleTable(step)


@settings(max_examples=60, deadline=None)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_found_without_its_checksum(pristine, tmp_path_factory, kept):
    """Ranks other than the first do not read whole files to verify them."""
    data = (pristine / "rollout-0.safetensors").read_bytes()
    path = tmp_path_factory.mktemp("cut") / "rollout-0.safetensors"
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(DataError, match=r"truncated|unreadable") as caught:
        read_columns(path)
    assert str(path) == caught.value.where


def test_an_unfinished_step_is_refused_and_then_replaced(tmp_path):
    directory = tmp_path / "step_000002"
    write_shard(
        begin_step(directory) / "rollout-0.safetensors",
        [
            RolloutGroup(
                Prompt("p", "d", "", (1,), ""), (completion_of(3, np.random.default_rng(0)),), 0
            )
        ],
    )
    for path in (directory, directory.with_name("step_000002.tmp")):
        with pytest.raises(DataError, match="not a recorded step"):
            SampleTable(path)
    assert list(begin_step(directory).iterdir()) == []


def test_another_format_is_refused(step):
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        SampleTable(step)


def test_columns_stay_on_disk_until_they_are_sliced(tmp_path):
    write_columns(tmp_path / "large", {"a": np.arange(1 << 23), "b": np.ones(3, np.uint16)})
    process = psutil.Process()
    read_columns(tmp_path / "large")  # whatever is imported for it
    before = process.memory_info().rss
    columns = read_columns(tmp_path / "large")
    assert process.memory_info().rss - before < 16 << 20 < columns["a"].nbytes
    assert columns["a"][1 << 22] == 1 << 22 and columns["b"].dtype == np.uint16


def test_a_table_of_one_domain_has_its_rows_and_nothing_else(tmp_path):
    rng = np.random.default_rng(3)
    working = begin_step(tmp_path / "step")
    groups = []
    rows = []
    for number in range(6):
        prompt = Prompt(str(number), "d", "", (number, 1), "")
        completions = tuple(completion_of(length, rng) for length in (3, 1 + number))
        groups.append(RolloutGroup(prompt, completions, 0))
        for sample in range(2):
            row = SampleRow(
                shard=0,
                index=2 * number + sample,
                group=number,
                update=number // 3,
                reward=float(2 * number + sample),
                domain=number % 2,
                episode=number,
            )
            rows.append(row)
    shard = write_shard(working / "rollout-0.safetensors", groups)
    facts = StepFacts(domains=["math", "code"], dropped_rewards={"math": [1.0], "code": [0.5]})
    steps = [(0, 2, 0.25), (3, 1, 0.5), (10, 0, 0.75)]
    components = {"right": np.arange(12, dtype=np.float64)}
    finish_step(tmp_path / "step", [shard], rows, facts, components, steps)
    whole = SampleTable(tmp_path / "step")
    seen = []
    for domain in (StepDomain(0, "math"), StepDomain(1, "code")):
        table = SampleTable(tmp_path / "step", domain=domain)
        assert table.domain_name == domain.name
        assert table.manifest.dropped_rewards.keys() == {domain.name}
        assert table.episode.tolist() == [0, 0, 1, 1, 2, 2]
        np.testing.assert_array_equal(table.components["right"], table.rows_of_step)
        np.testing.assert_array_equal(table.group, whole.group[table.rows_of_step])
        for row, of_step in enumerate(table.rows_of_step.tolist()):
            np.testing.assert_array_equal(table.completion(row)[0], whole.completion(of_step)[0])
            assert table.reward[row] == whole.reward[of_step]
        step_rows, ends, rewards = table.steps
        for row, end, reward in zip(step_rows, ends, rewards, strict=True):
            seen.append((int(table.rows_of_step[row]), int(end), float(reward)))
    assert sorted(seen) == steps
    assert len(SampleTable(tmp_path / "step", domain=StepDomain(2, "none"))) == 0
