"""Malformed answers are refused with the engine and the reason; good ones are read exactly."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.generate import GenerateRequest
from grpo_megatron.types import VersionSpan
from tests.rollout.fake_engine import answer, npy

REQUEST = {"token_ids": [1, 2, 3], "sampling_params": {"n": 2, "max_tokens": 4}}


def decode(document, **changes):
    settings = {"n": 2, "max_tokens": 4, "record_routes": True}
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return GenerateRequest([1, 2, 3], **settings | changes).decode(body, "engine 5").completions


def test_a_good_answer():
    document = answer(REQUEST, routes=True)
    document["choices"].reverse()
    first, second = decode(document)
    assert first.token_ids.tolist() == [42, 43, 44, 45] and first.token_ids.dtype == np.int32
    assert first.logprobs.dtype == np.float32
    np.testing.assert_allclose(first.logprobs, [-0.92, -0.93, -0.94, -0.95], rtol=1e-6)
    assert first.versions == (VersionSpan(3, 0, 4),) and first.truncated
    assert first.routes.shape == (6, 3, 2)
    assert second.token_ids.tolist() == [43, 44, 45, 46]


def truncated(*sets: list[tuple[int, float]]):
    """Kept sets of an answer whose tokens are 42, 43, ... and which reports `sets`."""
    document = answer(REQUEST)
    for one in document["choices"]:
        for entry, candidates in zip(one["logprobs"]["content"], sets, strict=True):
            entry["top_logprobs"] = [
                {"token_id": t, "logprob": p, "rank": 1} for t, p in candidates
            ]
    return decode(document, truncation={"top_k": 2}, record_routes=False)[0].kept


def test_kept_ids_are_the_candidates_with_a_probability():
    half, none = math.log(0.5), -9999.0
    kept = truncated(
        [(42, half), (7, half), (8, none)],
        [(43, 0.0), (42, none)],
        [(45, half), (44, half), (1, none)],
        [(45, 0.0)],
    )
    assert kept.ids.tolist() == [42, 7, 43, 45, 44, 45] and kept.ids.dtype == np.int32
    assert kept.offsets.tolist() == [0, 2, 3, 5, 6]


def test_sets_that_cannot_be_right_are_not_known():
    half, none = math.log(0.5), -9999.0
    kept = truncated(
        [(42, half), (7, half + 1e-3)],  # more than everything
        [(43, half), (7, none)],  # a kept id was not reported
        [(7, half), (8, half)],
        [(45, none), (7, 0.0)],
    )  # not what was sampled
    assert kept.ids.tolist() == [] and kept.offsets.tolist() == [0] * 5


def choice(**values):
    return lambda document: document["choices"][1].update(values)


def spans(*triples):
    return choice(weight_versions=[{"version": v, "start": s, "end": e} for v, s, e in triples])


def logprob(value):
    return lambda d: d["choices"][1]["logprobs"]["content"][2].update(logprob=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["choices"].pop(), "asked for 2 completions"),
        (choice(index=0), "asked for 2 completions"),
        (choice(finish_reason="abort"), "ended with 'abort'"),
        (choice(token_ids=[]), "0 tokens"),
        (choice(token_ids=[1, 2, 3, 4, 5]), "5 tokens"),
        (choice(token_ids=[1, 2, 3]), "4 log-probs for 3 tokens"),
        (choice(token_ids=[1, 2, 3, 4]), "other tokens"),
        (choice(logprobs=None), "0 log-probs"),
        (logprob(0.5), "not finite and at most 0"),
        (logprob(-9999.0), "not finite and at most 0"),
        (spans(), "do not cover"),
        (choice(weight_versions=None), "do not cover"),
        (spans(("1", 0, 2)), "do not cover"),
        (spans(("1", 0, 2), ("2", 3, 4)), "do not cover"),
        (spans(("1", 0, 2), ("2", 1, 4)), "do not cover"),
        (spans(("1", 0, 4), ("2", 4, 4)), "do not cover"),
        (spans(("1", 0, 5)), "do not cover"),
        (spans(("default", 0, 4)), "'default' is not a number"),
        (choice(routed_experts=None), "are missing"),
        (choice(routed_experts="%%%"), "unreadable expert routes"),
        (choice(routed_experts="aGVsbG8="), "unreadable expert routes"),
        (choice(routed_experts=npy(np.zeros((5, 3, 2), np.uint8))), "(5, 3, 2)"),
        (choice(routed_experts=npy(np.zeros((6, 3), np.uint8))), "(6, 3)"),
        (choice(routed_experts=npy(np.zeros((6, 3, 2), np.float32))), "float32"),
        (choice(token_ids="12"), "unreadable answer"),
    ],
)
def test_bad_answers(change, message):
    document = answer(REQUEST, routes=True)
    change(document)
    with pytest.raises(EngineError) as caught:
        decode(document)
    assert message in str(caught.value) and "engine 5" in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"{}", b"\xff"])
def test_what_is_not_an_answer(body):
    with pytest.raises(EngineError, match="unreadable answer"):
        decode(body)
