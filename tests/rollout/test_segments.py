"""Chains of segments: what is asked for, how parts are merged, what a dead replica costs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.generate import GenerateRequest
from grpo_megatron.rollout.segments import complete, merge
from grpo_megatron.types import Completion, Prompt, SamplingMask, VersionSpan
from tests.rollout.fake_engine import answer
from tests.rollout.test_chunk_sampling import PROMPTS, expected, run

PROMPT = (5, 6, 7)


class Engine:
    """Answers by a script of (tokens, finish reason, version, with routes) per request. The token
    at position p is p, its log-prob -p, the only expert of row p is p."""

    def __init__(self, *script: tuple[int, str, int, bool], width: int = 1):
        self.script, self.width, self.asked = list(script), width, []

    async def __call__(self, token_ids, *, n, max_tokens, seed, routes_from):
        self.asked.append((len(token_ids), n, max_tokens, seed, routes_from))
        assert token_ids[:3] == PROMPT or token_ids[:3] == list(PROMPT)
        return [self._one(len(token_ids), routes_from) for _ in range(n)]

    def _one(self, start: int, first: int) -> Completion:
        count, reason, version, routed = self.script.pop(0)
        rows = np.arange(first, start + count - 1, dtype=np.uint8)
        return Completion(
            np.arange(start, start + count, dtype=np.int32),
            -np.arange(start, start + count, dtype=np.float32),
            (VersionSpan(version, 0, count),) if count else (),
            reason,
            "",
            np.repeat(rows[:, None, None], self.width, 2) if routed and count else None,
            (VersionSpan(version, first, start + count - 1),) if routed and count else (),
        )


def merged(engine: Engine, **settings) -> Completion:
    arguments = {"n": 1, "max_tokens": 8}
    (whole,) = asyncio.run(complete(engine, PROMPT, **arguments | settings))
    assert whole.token_ids.tolist() == list(range(3, 3 + len(whole.token_ids)))
    assert whole.logprobs.tolist() == [-t for t in whole.token_ids]
    return whole


def test_a_completion_that_was_aborted_goes_on_under_other_weights():
    engine = Engine(
        (0, "abort", 0, True),
        (3, "abort", 1, True),
        (0, "abort", 2, True),
        (2, "abort", 2, True),
        (2, "stop", 2, True),
    )
    whole = merged(engine)
    assert engine.asked == [
        (3, 1, 8, None, 0),
        (3, 1, 8, None, 0),
        (6, 1, 5, None, 5),
        (6, 1, 5, None, 5),
        (8, 1, 3, None, 7),
    ]
    assert whole.finish_reason == "stop" and len(whole.token_ids) == 7
    assert whole.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 7))
    # row 2 + t sampled token t
    assert whole.route_versions == (VersionSpan(1, 0, 5), VersionSpan(2, 5, 9))
    assert whole.routes[:, 0, 0].tolist() == list(range(9))


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_the_last_token_ends_it(reason):
    whole = merged(Engine((6, "abort", 0, True), (2, reason, 0, True)))
    assert whole.truncated and len(whole.token_ids) == 8
    assert whole.versions == (VersionSpan(0, 0, 8),)
    assert whole.route_versions == (VersionSpan(0, 0, 10),)


@pytest.mark.parametrize(
    ("routed", "covered"),
    [
        ((True, False, True), ((0, 5), (8, 10))),
        ((False, True, True), ((5, 10),)),
        ((True, True, False), ((0, 8),)),
        ((False, False, False), ()),
    ],
)
def test_rows_of_a_segment_without_routes_are_not_covered(routed, covered):
    whole = merged(
        Engine(*((3, "length", 4, one) for one in routed[:2]), (2, "length", 4, routed[2])),
        segment_tokens=3,
    )
    assert whole.route_versions == tuple(VersionSpan(4, *span) for span in covered)
    if covered:
        assert whole.routes.shape == (10, 1, 1)
        for start, end in covered:
            assert whole.routes[start:end, 0, 0].tolist() == list(range(start, end))
    else:
        assert whole.routes is None


def test_segments_have_seeds_of_their_own():
    engine = Engine(*[(2, "length", 0, False)] * 8)
    completions = asyncio.run(complete(engine, PROMPT, n=2, max_tokens=8, segment_tokens=2, seed=9))
    assert [len(c.token_ids) for c in completions] == [8, 8]
    assert engine.asked[0] == (3, 2, 2, 9, 0)
    seeds = [seed for _, _, _, seed, _ in engine.asked]
    assert len(set(seeds)) == len(seeds) == 7
    again = Engine(*[(2, "length", 0, False)] * 8)
    asyncio.run(complete(again, PROMPT, n=2, max_tokens=8, segment_tokens=2, seed=9))
    assert sorted(again.asked) == sorted(engine.asked)


def test_a_full_context_ends_it():
    engine = Engine((4, "length", 0, True), (2, "length", 0, True))
    whole = merged(engine, segment_tokens=4)
    assert len(whole.token_ids) == 6 and whole.truncated and len(engine.asked) == 2


def test_a_prompt_leaves_room_for_fewer_tokens():
    async def scenario(started, pool, worker):
        await worker.rollouts(0, [Prompt("long", "d", "", tuple(range(254)), "")])
        return [r["sampling_params"]["max_tokens"] for r in started[0].requests]

    assert run(scenario, segment_tokens=2) == [2]


def test_kept_sets_are_joined():
    def part(sizes, reason):
        offsets = np.cumsum([0, *sizes])
        return replace(
            Engine((len(sizes), reason, 0, False))._one(3, 0),
            kept=SamplingMask(np.arange(offsets[-1], dtype=np.int32), offsets),
        )

    whole = merge(part([2, 0], "abort"), part([1, 3], "stop"), 3)
    assert whole.kept.ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert whole.kept.offsets.tolist() == [0, 2, 2, 3, 6]


def test_segments_of_different_models_are_refused():
    engine, narrow = Engine((3, "length", 0, True), width=2), Engine((3, "length", 0, True))

    async def ask(token_ids, **settings):
        return await (engine if len(token_ids) == 3 else narrow)(token_ids, **settings)

    with pytest.raises(EngineError, match=r"shapes \[\(1, 2\), \(1, 1\)\]"):
        asyncio.run(complete(ask, PROMPT, n=1, max_tokens=6, segment_tokens=3))


def test_an_engine_that_aborts_everything_is_named():
    with pytest.raises(EngineError, match="aborted 100 times"):
        merged(Engine(*[(0, "abort", 0, True)] * 101))


def test_a_dead_replica_costs_one_segment():
    async def scenario(started, pool, worker):
        async def dies(request):
            if len(request["token_ids"]) > 2:
                started[1].healthy = False
                return web.Response(status=500, text="gone")
            return await started[1].answer(request)

        started[1].generate = dies
        groups = await worker.rollouts(0, PROMPTS)
        return groups, [r for engine in started for r in engine.requests]

    groups, requests = run(scenario, engines=2, segment_tokens=3, max_concurrent_requests=1)
    for group in groups:
        first = [expected(group.prompt, child)[:3] for child in range(4)]
        assert [c.token_ids[:3].tolist() for c in group.completions] == first
        assert all(len(c.token_ids) == 4 for c in group.completions)
    heads = [r for r in requests if len(r["token_ids"]) == 2]
    assert len(heads) == len(PROMPTS), "no first segment was sampled twice"
    assert {r["sampling_params"]["max_tokens"] for r in requests} == {3, 1}


def test_an_aborted_answer_may_be_empty_and_only_where_it_is_expected():
    request = {"token_ids": [1, 2, 3], "sampling_params": {"n": 1, "max_tokens": 4}}
    document = answer(request, routes=True)
    document["choices"][0] |= {
        "token_ids": [],
        "finish_reason": "abort",
        "weight_versions": None,
        "logprobs": {"content": []},
        "routed_experts": None,
    }
    asked = GenerateRequest([1, 2, 3], 4, record_routes=True)
    body = json.dumps(document).encode()
    (empty,) = replace(asked, may_abort=True).decode(body, "engine").completions
    assert (len(empty.token_ids), empty.finish_reason, empty.routes) == (0, "abort", None)
    with pytest.raises(EngineError, match="ended with 'abort'"):
        asked.decode(body, "engine")


def test_missing_routes_may_be_left_to_the_trainer():
    request = {"token_ids": [1, 2, 3], "sampling_params": {"n": 1, "max_tokens": 4}}
    asked = GenerateRequest([1, 2, 3], 4, record_routes=True, require_routes=False)
    body = json.dumps(answer(request, routes=False)).encode()
    (completion,) = asked.decode(body, "engine").completions
    assert completion.routes is None and completion.route_versions == ()
