"""A Megatron trainer publishes to vLLM servers, driven by the controller's own `Publisher`.

gloo and CPU kernels: this says nothing about NCCL or about the kernels of a GPU.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer.requests import CompareLogprobs, SendWeights, Train
from grpo_megatron.types import Prompt
from tests.integration.conftest import TOLERANCE, publishing
from tests.rollout.engines import Server
from tests.rollout.servers import DUMMY
from tests.trainer.models import write_samples

LAYOUTS = {"world1": {}, "world4": {"pipeline_parallel_size": 2, "expert_parallel_size": 2}}
pytestmark = pytest.mark.engine

PROMPTS = [
    Prompt(f"p{i}", "d", "", tuple((7 * j + i) % 256 for j in range(3, 9 + 8 * i)), "")
    for i in range(4)
]


async def assert_agree(publisher: Publisher) -> None:
    found = await publisher.check_logprobs(PROMPTS)
    assert 0 < found["canary/abs_mean"] <= found["canary/abs_max"] <= TOLERANCE


async def assert_differ(publisher: Publisher) -> None:
    with pytest.raises(MismatchError, match="and the trainer disagree about log-probs"):
        await publisher.check_logprobs(PROMPTS)


def train_request(samples: str, first_update: int = 0, num_updates: int = 1) -> Train:
    return Train(
        directory=Path(samples), first_update=first_update, num_updates=num_updates, state={}
    )


@pytest.fixture(scope="session")
def training_samples(tmp_path_factory) -> str:
    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", vocab_size=256)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logprobs_are_the_engines_before_and_after_training(
    servers, checkpoints, world1, training_samples, tmp_path, kind, temperature
):
    async def run():
        async with publishing(
            world1,
            getattr(checkpoints, kind),
            [getattr(servers, kind)],
            tmp_path,
            temperature=temperature,
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            await assert_agree(publisher)
            for step in range(2):
                await trainer.call(train_request(training_samples, step, num_updates=2))
            await assert_differ(publisher)
            await publisher.publish(2)
            await assert_agree(publisher)
            (completion,) = await clients[0].generate(PROMPTS[0].token_ids, max_tokens=4)
            assert [span.version for span in completion.versions] == [2]

    asyncio.run(run())


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_engines_that_rest_answer_with_the_weights_that_come(
    servers, checkpoints, world1, training_samples, tmp_path, pause
):
    """They take requests, and every token is the new weights': by its span and its log-prob."""

    async def run():
        async with publishing(
            world1, checkpoints.moe, [servers.moe], tmp_path, publish={"pause": pause}
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            assert not publisher.holds_requests
            await publisher.pause_engines()
            assert publisher.holds_requests
            asked = asyncio.gather(
                *(clients[0].generate(prompt.token_ids, max_tokens=8) for prompt in PROMPTS)
            )
            await trainer.call(train_request(training_samples))
            assert not asked.done()
            await publisher.publish(2)
            assert not publisher.holds_requests
            completions = [completion for (completion,) in await asked]
            assert {span.version for c in completions for span in c.versions} == {2}
            directory = tmp_path / "asked"
            record_completions(
                directory, [(0, p, c) for p, c in zip(PROMPTS, completions, strict=True)]
            )
            found = await trainer.call(CompareLogprobs(directory))
            assert not found.problem and 0 < found.metrics["canary/abs_max"] <= TOLERANCE

    asyncio.run(run())


BESIDE = {"pause": "keep", "beside_decoding": True}


@pytest.mark.parametrize("delta", [False, True])
def test_weights_come_while_engines_decode(
    servers, checkpoints, world4, training_samples, tmp_path, delta
):
    """While the trainer sends no engine pauses, and requests go on from one version to the next;
    then engines hold the bytes that come in a pause."""
    layout = LAYOUTS["world4"]
    engines = [servers.moe, servers.moe_tp2]
    publish = {**BESIDE, "delta": delta}

    async def run():
        async with publishing(
            world4, checkpoints.moe, engines, tmp_path, layout=layout, publish=publish
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            await assert_agree(publisher)
            await trainer.call(train_request(training_samples))
            await trainer.run("slow_down", seconds=0.5)
            asked = asyncio.gather(
                *(client.generate(PROMPTS[3].token_ids, max_tokens=200) for client in clients)
            )
            call = trainer.call
            paused = []

            async def sending(request):
                sent = await call(request)
                if isinstance(request, SendWeights):
                    for client in clients:
                        answer = await client.control("/is_paused", method="GET")
                        paused.append(answer["is_paused"])
                return sent

            trainer.call = sending
            await publisher.publish(2)
            assert paused == [False, False]
            for (completion,) in await asked:
                assert {span.version for span in completion.versions} <= {1, 2}
            await assert_agree(publisher)
            beside = [await client.weight_checksums() for client in clients]
            await publisher.pause_engines()
            await publisher.publish(3)
            assert [await client.weight_checksums() for client in clients] == beside
            await assert_agree(publisher)

    asyncio.run(run())


def test_another_temperature_is_noticed(servers, checkpoints, world1, tmp_path):
    """The comparison above would be empty if it could not tell temperatures apart."""

    async def run():
        async with publishing(
            world1, checkpoints.dense, [servers.dense], tmp_path, temperature=0.7
        ) as (publisher, _, _):
            await publisher.publish(1)
            rollout = publisher.config.rollout.model_copy(update={"temperature": 1.0})
            publisher.config = publisher.config.model_copy(update={"rollout": rollout})
            await assert_differ(publisher)

    asyncio.run(run())


def test_tensor_pipeline_and_expert_parallel_trainer_to_tp1_and_tp2(
    servers, checkpoints, world4, training_samples, tmp_path
):
    layout = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }

    async def run():
        async with publishing(
            world4, checkpoints.moe, [servers.moe, servers.moe_tp2], tmp_path, layout=layout
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            await assert_agree(publisher)
            first = [await client.weight_checksums() for client in clients]
            reports = [
                report
                for client in clients
                for report in await client.call_workers("update_report")
            ]
            assert len(reports) == 3  # one worker and two
            for report in reports:
                assert report["digests"] and not report["failure"] and not report["changed"]
            assert [report["stream"] for report in reports] == [0, 1, 2]  # all keep other parts
            await trainer.call(train_request(training_samples))
            await publisher.publish(2)
            await assert_agree(publisher)
            second = [await client.weight_checksums() for client in clients]
        async with publishing(
            world4, checkpoints.moe, [servers.moe, servers.moe_tp2], tmp_path, layout=layout
        ) as (publisher, _, clients):
            await publisher.publish(3)
            third = [await client.weight_checksums() for client in clients]
        for before, changed, restored in zip(first, second, third, strict=True):
            assert before == restored
            assert before.keys() == changed.keys()
            same = [name for name in before if before[name] == changed[name]]
            assert len(same) < len(before) / 2
            # linear layers of vLLM's CPU build keep only a packed copy, which is not looked at
            assert all(name.endswith(("_proj.weight", "gate.weight")) for name in same), same

    asyncio.run(run())


def test_every_rank_sends_what_it_holds(servers, checkpoints, world4, tmp_path):
    """Stages and experts; nobody sends for another, and the work is shared."""

    async def run():
        async with publishing(
            world4,
            checkpoints.moe,
            [servers.moe, servers.moe_tp2],
            tmp_path,
            layout={"pipeline_parallel_size": 2, "expert_parallel_size": 2},
            publish={"bucket_mib": 1},
        ) as (publisher, trainer, _):
            await publisher.publish(1)
            await assert_agree(publisher)
            await publisher.publish(2)  # the same groups serve again
            await assert_agree(publisher)
            return await trainer.run("sent_bytes")

    sent = asyncio.run(run())
    assert min(sent) > 0.8 * max(sent)


@pytest.mark.parametrize("publish", [{}, BESIDE], ids=["paused", "beside"])
def test_a_corrupted_tensor_is_caught_by_its_digest(
    servers, checkpoints, world1, tmp_path, publish
):
    async def run():
        async with publishing(
            world1, checkpoints.moe, [servers.moe], tmp_path, publish=publish
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            await trainer.run("flip_a_bit", rank=0)
            with pytest.raises(MismatchError, match=r"1 of .* tensors reached worker 0 of moe"):
                await publisher.publish(2)
            assert publisher.version == 1
            paused = await clients[0].control("/is_paused", method="GET")
            assert paused["is_paused"], "nobody may sample from these weights"
            await publisher.publish(3)
            await assert_agree(publisher)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("world", "left", "publish"),
    [
        ("world1", "moe", {}),
        pytest.param("world1", "moe_tp2", {}, marks=pytest.mark.chaos),
        pytest.param("world4", "moe", {}, marks=pytest.mark.chaos),
        pytest.param("world1", "moe", BESIDE, marks=pytest.mark.chaos),
    ],
)
def test_an_engine_that_dies_during_a_publish_costs_no_run(
    request, servers, spare_servers, checkpoints, world, left, publish, tmp_path
):
    """The trainer survives, and the engine that is left, which has a part of it, gets it whole.

    So do requests for these weights: those of the dead engine go to the other, which is paused."""
    survivor = getattr(servers, left)
    if spare_servers:
        victim = spare_servers.pop()
    else:
        victim = Server.start("victim", checkpoints.moe, tmp_path, **DUMMY)

    async def run():
        async with publishing(
            request.getfixturevalue(world),
            checkpoints.moe,
            [victim, survivor],
            tmp_path,
            layout=LAYOUTS[world],
            publish=publish,
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            control = clients[0].control

            async def dying(path, *request, **options):
                begins = path == "/update_weights"
                if publish == BESIDE:
                    begins = bool(request) and request[0].get("method") == "begin_receiving"
                if begins:
                    asyncio.get_running_loop().call_later(0.08, os.killpg, victim.process.pid, 9)
                return await control(path, *request, **options)

            clients[0].control = dying
            await trainer.run("slow_down", seconds=0.2)
            if publish != BESIDE:
                await publisher.pause_engines()
            asked = asyncio.gather(
                *(
                    publisher.engines.call(
                        lambda replica: replica.client.generate(PROMPTS[0].token_ids, max_tokens=8),
                        first=replica,
                    )
                    for replica in publisher.engines.replicas
                )
            )
            await publisher.publish(2)
            answers = await asked
            first, second = [replica.client.name for _, replica in answers]
            assert second == survivor.name
            if publish != BESIDE:  # else the victim decodes until it dies, and may have answered
                assert first == survivor.name
            assert {
                span.version
                for completions, _ in answers
                for completion in completions
                for span in completion.versions
            } <= ({1, 2} if publish == BESIDE else {2})
            assert [r.client.name for r in publisher.engines.alive] == [survivor.name]
            assert publisher.version == 2
            await assert_agree(publisher)
            await publisher.publish(3)
            await assert_agree(publisher)

    try:
        victim.wait()
        asyncio.run(run())
    finally:
        victim.stop()


@pytest.mark.parametrize("name", ["mlp.gate.weight", "layers.1.self_attn.q_proj.weight"])
def test_noise_after_loading_is_caught_by_the_logprob_check_only(
    servers, checkpoints, world1, tmp_path, name
):
    async def run():
        async with publishing(
            world1,
            checkpoints.moe,
            [servers.moe, servers.moe_tp2],
            tmp_path,
        ) as (publisher, _, clients):
            await clients[1].call_workers("sabotage_next_update", noise=f"{name}:0.05")
            await publisher.publish(1)  # digests agree
            with pytest.raises(MismatchError, match="weight version 1: moe-tp2 and the trainer"):
                await publisher.check_logprobs(PROMPTS)
            await publisher.publish(2)
            await assert_agree(publisher)

    asyncio.run(run())


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}])
def test_publishing_through_a_file(servers, checkpoints, world1, world4, tmp_path, layout):
    """Also into a server that was started with dummy weights."""

    async def run():
        async with publishing(
            world4 if layout else world1,
            checkpoints.other_moe,
            [servers.moe, servers.moe_tp2],
            tmp_path,
            layout=layout,
            publish={"method": "file"},
        ) as (publisher, _, clients):
            await publisher.publish(9)
            await assert_agree(publisher)
            (completion,) = await clients[0].generate(PROMPTS[0].token_ids, max_tokens=4)
            assert [span.version for span in completion.versions] == [9]

    asyncio.run(run())
