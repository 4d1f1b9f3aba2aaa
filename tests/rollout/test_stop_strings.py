"""Turns that end with a stop string: which tokens stay, and what stays with them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rollout.stop_strings import first_stop, first_tokens, num_tokens_to_stop
from grpo_megatron.types import Completion, SamplingMask, VersionSpan


@settings(deadline=None)
@given(
    tokens=st.lists(st.text("ab:", min_size=1, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text("ab:", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_the_first_token_that_completes_a_stop_is_the_last(tokens, stops):
    def text_of(num_tokens):
        return "".join(tokens[:num_tokens])

    expected = None
    for num_tokens in range(1, len(tokens) + 1):
        if expected is None and any(stop in text_of(num_tokens) for stop in stops):
            expected = num_tokens
    assert num_tokens_to_stop(text_of, len(tokens), stops) == expected
    if expected is not None:
        place = first_stop(text_of(expected), stops)
        assert not any(stop in text_of(expected)[:place] for stop in stops)


def test_all_that_is_known_of_the_tokens_stays():
    num_prompt, num_tokens, first_row = 5, 6, 3
    rows = np.arange(first_row, num_prompt + num_tokens - 1, dtype=np.uint16)
    whole = Completion(
        np.arange(10, 16, dtype=np.int32),
        -np.arange(1, 7, dtype=np.float32),
        (VersionSpan(1, 0, 2), VersionSpan(2, 2, 5), VersionSpan(3, 5, 6)),
        "length",
        "",
        routes=np.broadcast_to(rows[:, None, None], (len(rows), 2, 3)),
        route_versions=(VersionSpan(1, 3, 6), VersionSpan(2, 6, 10)),
        kept=SamplingMask(np.arange(9, dtype=np.int32), np.array([0, 1, 3, 3, 6, 8, 9])),
    )
    found = first_tokens(whole, 4, num_prompt)
    assert found.token_ids.tolist() == [10, 11, 12, 13]
    assert found.logprobs.tolist() == [-1, -2, -3, -4]
    assert found.versions == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4))
    # rows up to the one that sampled the fourth token
    assert found.routes[:, 0, 0].tolist() == [3, 4, 5, 6, 7]
    assert found.route_versions == (VersionSpan(1, 3, 6), VersionSpan(2, 6, 8))
    assert found.kept.sizes.tolist() == [1, 2, 0, 3] and found.kept.ids.tolist() == list(range(6))
    assert found.finish_reason == "stop"


def test_a_turn_that_is_whole_stays_whole():
    whole = Completion(
        np.arange(3, dtype=np.int32),
        np.zeros(3, np.float32),
        (VersionSpan(0, 0, 3),),
        "length",
        "",
    )
    found = first_tokens(whole, 3, 2)
    assert found.token_ids.tolist() == [0, 1, 2] and found.finish_reason == "stop"
    assert found.routes is None and found.kept is None
