"""A sequence of an episode, put together turn by turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rollout.sequence_builder import SequenceBuilder
from grpo_megatron.types import Completion, SamplingMask, Turn, VersionSpan, require_sound


def sampled(builder: SequenceBuilder, version: int, length: int, **more) -> Completion:
    """What an engine answers: tokens and log-probs by their place, routes by their row."""
    before = len(builder.token_ids)
    places = np.arange(before, before + length)
    rows = np.arange(builder.routes_from, before + length - 1, dtype=np.uint16)
    more.setdefault("routes", np.broadcast_to(rows[:, None, None], (len(rows), 2, 3)))
    more.setdefault("route_versions", (VersionSpan(version, builder.routes_from, rows[-1] + 1),))
    return Completion(
        places.astype(np.int32),
        (-places / 100).astype(np.float32),
        (VersionSpan(version, 0, length),),
        "stop",
        "",
        **more,
    )


@settings(deadline=None)
@given(
    num_prompt=st.integers(1, 5),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5),
)
def test_every_row_has_the_route_and_version_of_the_request_that_computed_it(num_prompt, turns):
    builder = SequenceBuilder(range(num_prompt))
    for version, (length, num_environment) in enumerate(turns):
        builder.add_turn(sampled(builder, version, length), f"state {version}")
        if num_environment and version + 1 < len(turns):
            places = len(builder.token_ids) + np.arange(num_environment)
            builder.add_environment(places.tolist())
    found = builder.completion("stop")
    num_all = num_prompt + found.num_tokens
    require_sound(found, "p")
    assert found.token_ids.tolist() == list(range(num_prompt, num_all))
    assert builder.token_ids == list(range(num_all))
    assert found.routes.shape == (num_all - 1, 2, 3)
    assert (found.routes == np.arange(num_all - 1)[:, None, None]).all()
    assert [turn.end - turn.start for turn in found.turns] == [length for length, _ in turns]
    is_policy = found.policy_mask
    expected = (-found.token_ids / 100).astype(np.float32)
    assert (found.logprobs[is_policy] == expected[is_policy]).all()
    # what stands before a turn was read by the weights that sampled it
    ends = [turn.end for turn in found.turns]
    starts = [0, *ends[:-1]]
    spans = [VersionSpan(v, *ends_) for v, ends_ in enumerate(zip(starts, ends, strict=True))]
    assert list(found.versions) == spans
    covered = [row for span in found.route_versions for row in range(span.start, span.end)]
    assert covered == list(range(num_all - 1))


def test_a_turn_that_new_weights_went_on_with():
    builder = SequenceBuilder([7])
    builder.add_turn(sampled(builder, 3, 2), "")
    builder.add_environment([8, 9])
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    builder.add_turn(
        Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), spans, "stop", ""), ""
    )
    assert builder.completion("stop").versions == (VersionSpan(3, 0, 5), VersionSpan(4, 5, 7))


def test_a_turn_without_routes_leaves_its_rows_uncovered():
    builder = SequenceBuilder([0, 1])
    builder.add_turn(sampled(builder, 0, 2), "")
    builder.add_environment([4])
    builder.add_turn(sampled(builder, 0, 2, routes=None, route_versions=()), "")
    builder.add_turn(sampled(builder, 0, 1), "")
    found = builder.completion("stop")
    assert found.routes[:, 0, 0].tolist() == [0, 1, 2, 0, 0, 0, 6]
    assert [(span.start, span.end) for span in found.route_versions] == [(0, 3), (6, 7)]


def test_tokens_of_the_environment_keep_no_ids():
    builder = SequenceBuilder([0])
    kept = SamplingMask(np.array([1, 5, 2], np.int32), np.array([0, 2, 3]))
    builder.add_turn(sampled(builder, 0, 2, kept=kept), "")
    builder.add_environment([3, 4])
    builder.add_turn(
        sampled(builder, 0, 1, kept=SamplingMask(np.array([5], np.int32), np.array([0, 1]))), ""
    )
    found = builder.completion("length")
    assert found.kept.sizes.tolist() == [2, 1, 0, 0, 1]
    assert found.kept.ids.tolist() == [1, 5, 2, 5]
    assert found.kept_counts.num_missing == 0


def test_what_the_environment_says_of_a_turn_comes_after_it():
    builder = SequenceBuilder([0])
    builder.add_turn(sampled(builder, 0, 2), "start")
    builder.judge_turn(0.5, spoilt=True)
    assert builder.turns == [Turn(0, 2, 0.5, "start", True)]


@pytest.mark.parametrize("num_environment", [1, 3])
def test_log_probs_of_the_environment_are_not_numbers(num_environment):
    builder = SequenceBuilder([0])
    builder.add_turn(sampled(builder, 0, 1), "")
    builder.add_environment([5] * num_environment)
    builder.add_turn(sampled(builder, 0, 1), "")
    is_unknown = np.isnan(builder.completion("stop").logprobs)
    assert is_unknown.tolist() == [False, *[True] * num_environment, False]
