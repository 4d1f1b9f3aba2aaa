"""The client, the plugin and publishing against real servers."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.chunk_sampling import ChunkSampler
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.types import Prompt, VersionSpan
from grpo_megatron.weights.publish_plan import checkpoint_order
from grpo_megatron.weights.transfer import StreamSender
from tests.rollout.engines import (
    VOCABULARY,
    Trainer,
    first_tie,
    logprob_error,
    reference,
    reference_routes,
    weights_of,
)

pytestmark = pytest.mark.engine

PROMPT = [(7 * i) % VOCABULARY for i in range(3, 40)]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def models(checkpoints):
    return {
        path: reference(path)
        for path in (checkpoints.moe, checkpoints.other_moe, checkpoints.dense)
    }


async def _restore(client, checkpoint, version: int = 0) -> None:
    await EngineControl([client]).publish_file(version, str(checkpoint))


@pytest.mark.parametrize(
    ("which", "temperature"),
    [
        *itertools.product(["moe", "dense"], [1.0, 0.7, 0.0]),
        ("moe_tp2", 1.0),
        pytest.param("moe_tp2", 0.7, marks=pytest.mark.matrix),
        pytest.param("moe_tp2", 0.0, marks=pytest.mark.matrix),
    ],
)
def test_logprobs_are_the_references(servers, models, which, temperature):
    server = getattr(servers, which)

    async def run():
        async with server.client() as client:
            await _restore(client, server.checkpoint)
            return await client.generate(
                PROMPT, n=1 if temperature == 0 else 4, max_tokens=24, temperature=temperature
            )

    for completion in asyncio.run(run()):
        # A greedy token's log-prob is that of temperature 1.
        error = logprob_error(models[server.checkpoint], PROMPT, completion, temperature or 1.0)
        assert error < TOLERANCE


def test_publish_from_two_senders_to_tp1_and_tp2(servers, checkpoints, models):
    """Weights arrive everywhere, with their version, and replace the prefix cache's as well."""
    weights = weights_of(checkpoints.other_moe)

    async def run():
        async with servers.moe.client() as one, servers.moe_tp2.client() as two:
            await _restore(one, checkpoints.moe)
            await _restore(two, checkpoints.moe)
            before = [await c.generate(PROMPT, max_tokens=24, seed=1) for c in (one, two)]
            await Trainer(weights).publish([one, two], weights, version=7)
            after = [await c.generate(PROMPT, max_tokens=24, seed=1) for c in (one, two)]
            return before, after

    before, after = asyncio.run(run())
    for old, new in zip(before, after, strict=True):
        assert logprob_error(models[checkpoints.moe], PROMPT, old[0]) < TOLERANCE
        assert logprob_error(models[checkpoints.other_moe], PROMPT, new[0]) < TOLERANCE
        assert [s.version for s in old[0].versions] == [0]
        assert [s.version for s in new[0].versions] == [7]


def test_publish_repeats_on_the_same_groups(servers, checkpoints, models):
    weights = [weights_of(checkpoints.moe), weights_of(checkpoints.other_moe)]

    async def run():
        async with servers.moe.client() as client:
            trainer = Trainer(weights[0])
            publisher = await trainer.connect([client])
            for version in range(1, 6):
                chosen = weights[version % 2]
                await publisher.publish(version, lambda c=chosen, v=version: trainer.send(c, v))
            return await client.generate(PROMPT, max_tokens=24)

    (completion,) = asyncio.run(run())
    assert logprob_error(models[checkpoints.other_moe], PROMPT, completion) < TOLERANCE
    assert completion.versions[0].version == 5


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_publish_in_flight_is_told_token_by_token(servers, checkpoints, models, mode):
    """Held or aborted and continued: log-probs and routes are those of the version they name."""
    weights = weights_of(checkpoints.other_moe)
    config = make_long(servers.moe.config)
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"deterministic": False})}
    )

    async def run():
        async with servers.moe.client() as client:
            await _restore(client, checkpoints.moe)
            trainer = Trainer(weights)
            publisher = await trainer.connect([client])
            publisher.pause_mode = mode
            worker = ChunkSampler(config, ReplicaPool([client]))
            prompts = [Prompt(name, "d", "", tuple(PROMPT), "") for name in ("p", "q")]
            running = asyncio.ensure_future(worker.rollouts(0, prompts, num_samples=36))
            await asyncio.sleep(0.5)
            await publisher.publish(1, lambda: trainer.send(weights, 1))
            return [c for group in await running for c in group.completions]

    completions = asyncio.run(run())
    assert {len(c.token_ids) for c in completions} == {200}
    # 64 sequences run at once; the others wait, and see only the new weights
    spans = [tuple(span.version for span in c.versions) for c in completions]
    assert set(spans) == {(0, 1), (1,)} and spans.count((1,)) >= 8
    num_checked = 0
    for completion in [c for c in completions if len(c.versions) == 2][:6]:
        old, new = completion.versions
        rows = len(PROMPT) - 1
        assert completion.route_versions == (
            VersionSpan(0, 0, rows + old.end),
            VersionSpan(1, rows + new.start, rows + new.end),
        )
        for span, checkpoint, other in (
            (old, checkpoints.moe, checkpoints.other_moe),
            (new, checkpoints.other_moe, checkpoints.moe),
        ):
            end = min(span.end, first_tie(models[checkpoint], PROMPT, completion) - rows)
            num_checked += max(end - span.start, 0)
            part = slice(span.start, end)
            assert _span_error(models[checkpoint], completion, part) < TOLERANCE
            assert _span_error(models[other], completion, slice(span.start, span.end)) > 1e-2
        for span in completion.route_versions:
            for version, checkpoint in enumerate((checkpoints.moe, checkpoints.other_moe)):
                end = span.end
                if version == span.version:
                    end = min(end, first_tie(models[checkpoint], PROMPT, completion))
                part = slice(span.start, end)
                routes = np.sort(completion.routes[part], -1)
                native = reference_routes(models[checkpoint], PROMPT, completion)[part]
                same = (routes == native).all(-1)
                assert same.all() if version == span.version else same.mean() < 0.5
    assert num_checked > 6 * 200 / 2  # ties are rare


def _span_error(model, completion, part) -> float:
    import torch

    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    return float(np.abs(expected - completion.logprobs)[part].max(initial=0.0))


def test_segments_give_what_one_request_does(servers, checkpoints, models):
    """Greedily the same completion bit by bit; sampled the same in every run."""
    prompts = [Prompt(f"p{i}", "d", "", tuple(PROMPT[: 10 + 7 * i]), "") for i in range(4)]

    def worker(client, segment_tokens):
        rollout = servers.moe.config.rollout.model_copy(update={"segment_tokens": segment_tokens})
        return ChunkSampler(
            servers.moe.config.model_copy(update={"rollout": rollout}), ReplicaPool([client])
        )

    async def run():
        async with servers.moe.client() as client:
            await _restore(client, checkpoints.moe)
            greedy = [
                [g.completions[0] for g in await worker(client, size).greedy(prompts, 24)]
                for size in (None, 3)
            ]
            sampled = []
            for order in (prompts, prompts[::-1]):
                groups = await worker(client, 3).rollouts(3, order)
                sampled.append({g.prompt.prompt_id: g.completions for g in groups})
            return greedy, sampled

    (whole, chained), (first, again) = asyncio.run(run())
    for a, b in zip(whole, chained, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert (a.versions, a.finish_reason) == (b.versions, b.finish_reason)
    for prompt in prompts:
        for a, b in zip(first[prompt.prompt_id], again[prompt.prompt_id], strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
            np.testing.assert_array_equal(a.routes, b.routes)
            assert len(a.token_ids) == 24 and len(a.versions) == len(a.route_versions) == 1
            assert logprob_error(models[checkpoints.moe], prompt.token_ids, a) < TOLERANCE
            native = reference_routes(models[checkpoints.moe], prompt.token_ids, a)
            np.testing.assert_array_equal(np.sort(a.routes, -1), native)


def test_cached_tokens_of_prompts_are_told(servers, checkpoints):
    """Those of all completions of a request; blocks have 32 tokens."""

    async def run():
        async with servers.moe.client() as client:
            await _restore(client, checkpoints.moe)
            await client.reset_prefix_cache()
            (*_, completion) = await client.generate(PROMPT, n=4, max_tokens=30)
            first = client.prefix_cache.take()
            later = [*PROMPT, *completion.token_ids.tolist()]
            await client.generate(later, max_tokens=4, is_continuation=True)
            return first, client.prefix_cache.take(), len(later)

    first, second, num_later = asyncio.run(run())
    assert first == {
        "prefix_cache/prompt_tokens": 4 * len(PROMPT),
        "prefix_cache/cached_tokens": 3 * 32,
    }
    assert second == {
        "prefix_cache/prompt_tokens": num_later,
        "prefix_cache/cached_tokens": num_later // 32 * 32,
        "prefix_cache/continued_prompt_tokens": num_later,
        "prefix_cache/continued_cached_tokens": num_later // 32 * 32,
    }


def test_routes_are_the_references(servers, checkpoints, models):
    """Cold, and with the prompt's routes coming from the prefix cache."""

    async def run():
        async with servers.moe.client() as client:
            await _restore(client, checkpoints.moe)
            return [
                c
                for _ in range(2)
                for c in await client.generate(PROMPT, n=4, max_tokens=24, record_routes=True)
            ]

    equal = rows = 0
    for completion in asyncio.run(run()):
        expected = reference_routes(models[checkpoints.moe], PROMPT, completion)
        assert completion.routes.shape == expected.shape
        equal += (np.sort(completion.routes, -1) == expected).all(-1).sum()
        rows += expected[..., 0].size
    assert equal == rows


class _FlipsABit(StreamSender):
    """Corrupts one bit of the first bucket after digests were taken."""

    def _pack(self, message, *arguments):
        data = super()._pack(message, *arguments)
        if message.sender == 1:
            data[message.offsets[0]] ^= 1
        return data


def test_corruption_on_the_wire_is_found(servers, checkpoints):
    weights = weights_of(checkpoints.other_moe)

    async def run():
        async with servers.moe.client() as client:
            try:
                with pytest.raises(
                    MismatchError, match="tensors reached worker 0 of moe"
                ) as caught:
                    await Trainer(weights, sender_class=_FlipsABit).publish([client], weights, 3)
                paused = await client.control("/is_paused", method="GET")
                assert paused["is_paused"], "engines must stay paused after a mismatch"
                return caught.value
            finally:
                await _restore(client, checkpoints.moe)

    error = asyncio.run(run())
    of_sender_1 = sorted(weights)[1::2]
    assert repr(sorted(of_sender_1, key=checkpoint_order)[0]) in str(error)


def test_sabotage_after_the_wire_passes_digests_but_changes_logprobs(servers, checkpoints, models):
    """What the log-prob check is for: the digests agree and the engine computes something else."""
    weights = weights_of(checkpoints.moe)

    async def run():
        async with servers.moe.client() as client:
            try:
                await client.call_workers("sabotage_next_update", noise="mlp.gate.weight:0.5")
                await Trainer(weights).publish([client], weights, 4)
                wrong = await client.generate(PROMPT, max_tokens=24)
                await Trainer(weights).publish([client], weights, 5)
                return wrong, await client.generate(PROMPT, max_tokens=24)
            finally:
                await _restore(client, checkpoints.moe)

    wrong, right = asyncio.run(run())
    assert logprob_error(models[checkpoints.moe], PROMPT, wrong[0]) > 1e-2
    assert logprob_error(models[checkpoints.moe], PROMPT, right[0]) < TOLERANCE


def test_deterministic_mode_ignores_order_and_concurrency(servers, checkpoints):
    prompts = [Prompt(f"p{i}", "d", "", tuple(PROMPT[: 10 + 4 * i]), "") for i in range(6)]

    async def sample(order: list[Prompt], concurrency: int, reset: bool):
        rollout = servers.moe.config.rollout.model_copy(
            update={"max_concurrent_requests": concurrency, "max_num_seqs": concurrency}
        )
        config = servers.moe.config.model_copy(update={"rollout": rollout})
        async with servers.moe.client() as client:
            if reset:
                await client.reset_prefix_cache()
            result = await ChunkSampler(config, ReplicaPool([client])).rollouts(3, order)
            return {g.prompt.prompt_id: g.completions for g in result}

    async def run():
        async with servers.moe.client() as client:
            await _restore(client, checkpoints.moe)
        shuffled = random.Random(0).sample(prompts, len(prompts))
        return [
            await sample(prompts, 24, True),
            await sample(shuffled, 3, False),
            await sample(prompts[::-1], 1, True),
        ]

    first, *others = asyncio.run(run())
    assert len({c.token_ids.tobytes() for g in first.values() for c in g}) > 12
    for other in others:
        for prompt_id, completions in first.items():
            for a, b in zip(completions, other[prompt_id], strict=True):
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
                np.testing.assert_array_equal(a.routes, b.routes)


def test_stop_tokens_end_completions_and_the_checkpoints_do_not(servers, checkpoints):
    """generation_config.json names token 2 as the end; only the request's own stop tokens count."""

    async def run():
        async with servers.dense.client() as client:
            await _restore(client, checkpoints.dense)
            free = await client.generate(PROMPT, n=32, max_tokens=60, seed=0)
            stop = await client.generate(
                PROMPT, n=32, max_tokens=60, seed=0, stop_token_ids=range(40)
            )
            return free, stop

    free, stop = asyncio.run(run())
    assert {c.finish_reason for c in free} == {"length"}
    assert any(2 in c.token_ids[:-1] for c in free)
    for completion in stop:
        assert completion.finish_reason == "stop" and completion.token_ids[-1] < 40
        assert (completion.token_ids[:-1] >= 40).all()


def test_refusals_are_not_retried(servers):
    async def run():
        async with servers.dense.client() as client:
            await client.generate([5] * 300, max_tokens=4)

    with pytest.raises(EngineError, match="400"):
        asyncio.run(run())


def test_a_real_server_refuses_strangers_at_every_route(servers):
    """Its own list of routes, those of vLLM's development mode among them."""

    async def run() -> dict[str, int]:
        url = f"http://127.0.0.1:{servers.dense.port}"
        async with servers.dense.client() as client:
            routes = (await client.control("/openapi.json", method="GET"))["paths"]
        found = {}
        async with aiohttp.ClientSession(url) as session:
            for path, methods in routes.items():
                for method in methods:
                    async with session.request(method, path) as response:
                        found[f"{method.upper()} {path}"] = response.status
        return found

    statuses = asyncio.run(run())
    assert statuses.pop("GET /health") == 200
    for route in (
        "POST /collective_rpc",
        "POST /inference/v1/generate",
        "POST /pause",
        "POST /reset_prefix_cache",
        "POST /update_weights",
        "POST /v1/completions",
    ):
        assert route in statuses
    assert set(statuses.values()) == {401}


def test_a_wrong_token_is_told_to_who_has_it(servers):
    async def run():
        url = f"http://127.0.0.1:{servers.dense.port}"
        async with EngineClient(url, "dense", token="another one") as client:
            await client.reset_prefix_cache()

    with pytest.raises(EngineError, match=r"401.*the token is missing or wrong"):
        asyncio.run(run())


def test_no_command_line_has_the_token(servers):
    """That of the server and of what it has started, as `ps` shows them to everybody."""
    shown = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown.append(file.read_bytes())
        except OSError:
            continue  # it has ended
    assert any(b"grpo_megatron.rollout.serve" in line for line in shown)
    assert not any(servers.dense.token.encode() in line for line in shown)
    assert servers.dense.token not in servers.dense.log.read_text()


def test_killed_server_ends_in_a_clear_error(checkpoints, servers, tmp_path):
    """kill -9 while requests are in flight. Last test of all that share the servers: it takes the
    dense one away."""
    server = servers.dense
    prompts = [Prompt(f"p{i}", "d", "", tuple(PROMPT), "") for i in range(8)]
    dead = []

    async def run():
        async with server.client() as client:
            pool = ReplicaPool([client], on_death=dead.append)
            config = make_long(server.config)
            work = asyncio.ensure_future(ChunkSampler(config, pool).rollouts(0, prompts))
            await asyncio.sleep(0.5)
            assert not work.done()
            server.process.kill()
            await work

    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    with pytest.raises(EngineError, match=r"no engine is alive.*dense"):
        asyncio.run(run())
    # Not so upstream, see plugin.engine_orphans.
    assert not psutil.wait_procs(children, timeout=300)[1], "engine processes outlive the server"
    assert [replica.client.name for replica in dead] == ["dense"]


def make_long(config):
    rollout = config.rollout.model_copy(update={"max_new_tokens": 200})
    batch = config.batch.model_copy(update={"num_samples_per_prompt": 64})
    return config.model_copy(update={"rollout": rollout, "batch": batch})
