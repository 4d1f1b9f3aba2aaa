"""Sequences of an episode: what they share, and that no plan takes them apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.packing import plan_microbatches
from grpo_megatron.batching.prefix_rows import SamplePaths, lay_out
from grpo_megatron.batching.sequences import Fork, shard_order
from grpo_megatron.batching.shared_prompts import shared_prompts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.errors import DataError
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan

MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def response(*ids: int, answered: tuple[int, ...] | None = None) -> Completion:
    return Completion(
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        (VersionSpan(0, 0, len(ids)),),
        "stop",
        "",
        answered_ids=answered,
    )


def episode(*sequences: Completion) -> Completion:
    *earlier, last = sequences
    return replace(last, earlier=tuple(earlier))


def table_of(directory, groups: list[tuple[tuple[int, ...], list[Completion]]]) -> SampleTable:
    recorded = []
    group_of = []
    for number, (prompt, completions) in enumerate(groups):
        recorded.append(RolloutGroup(Prompt("p", "d", "", prompt, ""), tuple(completions), 0))
        group_of += [number] * len(completions)
    entry = write_shard(begin_step(directory) / "rollout-0.safetensors", recorded)
    rows = []
    for number, places in enumerate(shard_order(recorded).places):
        for place in places:
            rows.append(SampleRow(0, place, group_of[number], 0, 0.0, episode=number))
    finish_step(directory, [entry], rows, StepFacts())
    return SampleTable(directory)


def paths_of(table: SampleTable) -> SamplePaths:
    return shared_prompts(table, np.arange(len(table))).paths


def tokens_of(table: SampleTable, row: int) -> list[int]:
    return [*table.prompt_ids(row).tolist(), *table.completion(row)[0].tolist()]


def test_what_routes_keep_sequences_from_sharing_is_counted(tmp_path, monkeypatch):
    group = ((1, 2), [episode(response(3, 4), response(3, 4, 5))])
    table = table_of(tmp_path / "step_000000", [group])
    assert shared_prompts(table, np.arange(2)).num_split == 0
    found = SampleTable.fork

    def cut(table: SampleTable, row: int) -> Fork | None:
        fork = found(table, row)
        return fork and replace(fork, is_cut=True)

    monkeypatch.setattr(SampleTable, "fork", cut)
    assert shared_prompts(table, np.arange(2)).num_split == 1


def test_where_a_sequence_leaves_the_one_before(tmp_path):
    """In the response, in the prompt, at once; the best of several is taken."""
    table = table_of(
        tmp_path / "step_000000",
        [
            (
                (1, 2, 3),
                [
                    episode(
                        response(4, 5, 6),
                        response(7, answered=(1, 2, 3, 4, 9)),
                        response(8, answered=(1, 2, 8)),
                        response(8, answered=(5, 5)),
                        response(4, 9, 7, 7),
                    )
                ],
            )
        ],
    )
    found = [table.fork(row) for row in range(5)]
    assert found[0] is None
    assert found[1] == Fork(0, 4, False)
    assert found[2] == Fork(0, 2, False)
    assert found[3] == Fork(-1, 0, False)
    assert found[4] == Fork(1, 6, False)


def test_pieces_are_cut_where_sequences_leave(tmp_path):
    """Another sample of the group shares the prompt, though it is cut in the middle."""
    table = table_of(
        tmp_path / "step_000000",
        [
            (
                (1, 2, 3),
                [
                    episode(response(4, 5), response(6, answered=(1, 2, 7))),
                    response(4, 8),
                ],
            )
        ],
    )
    paths = paths_of(table)
    assert paths.totals.tolist() == [5, 4, 5]
    assert paths.count_tokens(np.arange(3)) == 3 + 2 + 2 + 2
    tree = lay_out(paths)
    row = np.zeros(tree.num_tokens, np.int64)
    for sample, places in enumerate(tree.token_rows):
        row[places] = tokens_of(table, sample)
    assert row.tolist() == [1, 2, 3, 4, 5, 4, 8, 7, 6]


@st.composite
def forests(draw) -> list[tuple[tuple[int, ...], list[Completion]]]:
    """Groups over few tokens, so that sequences begin alike in many ways."""
    token = st.integers(1, 3)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = tuple(draw(st.lists(token, min_size=1, max_size=3)))
        completions = []
        for _ in range(draw(st.integers(1, 3))):
            sequences = []
            for _ in range(draw(st.integers(1, 3))):
                answered = draw(
                    st.one_of(
                        st.none(),
                        st.lists(token, min_size=1, max_size=5).map(tuple),
                        st.just((*prompt, 1, 2)),
                    )
                )
                ids = draw(st.lists(token, min_size=1, max_size=5))
                sequences.append(response(*ids, answered=answered))
            completions.append(episode(*sequences))
        groups.append((prompt, completions))
    return groups


@MANY
@given(forests())
def test_a_row_holds_every_sequence_whole(tmp_path, groups):
    """Every token lies where its sample has it, behind the same tokens; none counts twice."""
    table = table_of(tmp_path / f"step_{len(list(tmp_path.iterdir())):06d}", groups)
    paths = paths_of(table)
    assert paths.totals.tolist() == (table.prompt_lengths + table.completion_lengths).tolist()
    tree = lay_out(paths)
    row = np.full(tree.num_tokens, -1)
    for sample, places in enumerate(tree.token_rows):
        tokens = np.array(tokens_of(table, sample))
        taken = row[places]
        assert ((taken == -1) | (taken == tokens)).all()
        row[places] = tokens
        np.testing.assert_array_equal(tree.positions[places], np.arange(len(tokens)))
    assert (row >= 0).all()
    assert paths.count_tokens(np.arange(len(table))) == tree.num_tokens
    assert tree.num_tokens <= paths.totals.sum()


@MANY
@given(
    forests(),
    st.integers(1, 3),
    st.sampled_from([60, 90, 1000]),
    st.booleans(),
)
def test_episodes_are_never_taken_apart(tmp_path, groups, num_ranks, max_tokens, share):
    table = table_of(tmp_path / f"step_{len(list(tmp_path.iterdir())):06d}", groups)
    paths = paths_of(table)
    if not share:
        paths = paths.apart()
    plan = plan_microbatches(paths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len({len(of_rank) for of_rank in plan.samples}) == 1
    place_of = {}
    for rank, of_rank in enumerate(plan.samples):
        for number, rows in enumerate(of_rank):
            assert plan.paths.count_tokens(rows) <= max_tokens
            for row in rows.tolist():
                assert row not in place_of
                place_of[row] = (rank, number)
    assert sorted(place_of) == list(range(len(table)))
    for number in range(len(table.first_rows)):
        rows = table.rows_of(np.array([number])).tolist()
        assert len({place_of[row] for row in rows}) == 1


def long_episode(num_sequences: int) -> Completion:
    """Sequences of 30 tokens that differ in the last one."""
    sequences = []
    for number in range(num_sequences):
        sequences.append(response(number + 1, answered=tuple(range(100, 129))))
    return episode(*sequences)


def test_an_episode_that_only_fits_where_sequences_share(tmp_path):
    table = table_of(tmp_path / "step_000000", [((100,), [long_episode(3), response(5)])])
    paths = paths_of(table)
    plan = plan_microbatches(paths, num_ranks=1, max_tokens=40)
    assert [rows.tolist() for rows in plan.samples[0]] in ([[0, 1, 2], [3]], [[3], [0, 1, 2]])
    assert plan.paths.count_tokens(np.arange(3)) == 32


def test_an_episode_that_fits_nowhere_is_named(tmp_path):
    table = table_of(tmp_path / "step_000000", [((100,), [response(5), long_episode(3)])])
    with pytest.raises(DataError, match="sample 1 has 32 tokens in its 3 sequences"):
        plan_microbatches(paths_of(table), num_ranks=1, max_tokens=31)
