"""Adapters that vLLM computes beside the weights, published by a Megatron trainer to servers.

gloo and CPU kernels: this says nothing about the kernels that a GPU computes adapters with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.config.lora import ENGINE_ADAPTER, LoraConfig
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer.requests import CompareLogprobs, ResetOptimizer, TrainColdStart
from grpo_megatron.types import Completion
from tests.integration.conftest import TOLERANCE, publishing
from tests.integration.test_publish import PROMPTS, assert_agree, assert_differ, train_request
from tests.rollout.engines import Server, weights_of
from tests.rollout.engines import Trainer as WeightTrainer
from tests.rollout.servers import DUMMY
from tests.trainer.models import write_samples

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

ATTENTION = {"rank": 4, "targets": ["self_attn"], "publish": "adapter"}
EVERYWHERE = {"rank": 3, "alpha": 7, "rank_stabilised": True, "publish": "adapter"}
"""A rank that is none of vLLM's, and a scale that is neither alpha / rank nor a power of two."""


DOMAINS = ("even", "odd")
BY_DOMAIN = ATTENTION | {"per_domain": True}


@pytest.fixture(scope="module")
def training_samples(tmp_path_factory) -> str:
    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", vocab_size=256)


class Slots:
    """Servers with a slot for an adapter: a dense model, a mixture, and that with two workers; each
    is started for the first test that wants it."""

    def __init__(self, checkpoints, logs: Path):
        self._logs = logs
        self._started: dict[str, Server] = {}
        self._options = {
            "dense": (checkpoints.dense, EVERYWHERE, {}),
            "moe": (checkpoints.moe, ATTENTION, {}),
            "moe_tp2": (checkpoints.moe, ATTENTION, {"tensor_parallel_size": 2}),
            "domains": (checkpoints.moe, BY_DOMAIN, {"domains": DOMAINS}),
            "domains_tp2": (
                checkpoints.moe,
                BY_DOMAIN,
                {"domains": DOMAINS, "tensor_parallel_size": 2},
            ),
        }

    def __getitem__(self, name: str) -> Server:
        if name not in self._started:
            checkpoint, lora, options = self._options[name]
            settings = LoraConfig.model_validate(lora)
            server = Server.start(
                f"slots-{name}", checkpoint, self._logs, settings, **DUMMY, **options
            )
            self._started[name] = server
            server.wait()
        return self._started[name]

    def stop(self) -> None:
        for server in self._started.values():
            server.stop()


@pytest.fixture(scope="module")
def slots(checkpoints, tmp_path_factory):
    found = Slots(checkpoints, tmp_path_factory.mktemp("logs"))
    yield found
    found.stop()


async def greedy(client, adapter: str) -> list[Completion]:
    found = []
    for prompt in PROMPTS:
        found += await client.generate(
            prompt.token_ids, adapter=adapter, max_tokens=12, temperature=0.0
        )
    return found


def largest_difference(ones: Sequence[Completion], others: Sequence[Completion]) -> float:
    """Of log-probs, where both sampled the same tokens."""
    largest = 0.0
    for one, other in zip(ones, others, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        largest = max(largest, float(np.abs(one.logprobs - other.logprobs).max()))
    return largest


@pytest.mark.parametrize(
    ("name", "lora"),
    [("dense", EVERYWHERE), ("moe", ATTENTION)],
)
def test_an_adapter_published_is_a_merged_publish(
    slots, checkpoints, world1, training_samples, tmp_path, name, lora
):
    """The same trained adapters both ways; and neither are they what the weights alone give."""
    checkpoint = getattr(checkpoints, name)
    server = slots[name]

    async def published(way: str) -> tuple[list[Completion], list[Completion]]:
        async with publishing(
            world1, checkpoint, [server], tmp_path, lora=lora | {"publish": way}
        ) as (publisher, trainer, clients):
            adapter = ""
            if way == "adapter":
                adapter = ENGINE_ADAPTER
            await publisher.publish(1)
            before = await greedy(clients[0], adapter)
            for step in range(2):
                await trainer.call(train_request(training_samples, step, num_updates=2))
            await assert_differ(publisher)
            await publisher.publish(2)
            await assert_agree(publisher)
            return before, await greedy(clients[0], adapter)

    begin, merged = asyncio.run(published("merged"))
    same_begin, beside = asyncio.run(published("adapter"))
    assert largest_difference(begin, same_begin) < TOLERANCE
    assert largest_difference(merged, beside) < TOLERANCE
    assert [c.token_ids.tolist() for c in begin] != [c.token_ids.tolist() for c in beside]
    assert {span.version for c in beside for span in c.versions} == {2}


def test_weights_go_once_and_adapters_in_every_publish(
    slots, checkpoints, world2, training_samples, tmp_path
):
    """From two tensor-parallel ranks to engines of one worker and of two."""
    moe = slots["moe"]
    moe_tp2 = slots["moe_tp2"]

    async def run():
        async with publishing(
            world2,
            checkpoints.moe,
            [moe, moe_tp2],
            tmp_path,
            layout={"tensor_parallel_size": 2},
            lora=ATTENTION,
        ) as (publisher, trainer, clients):
            fractions = []
            weights = []
            for version in range(1, 4):
                await publisher.publish(version)
                await assert_agree(publisher)
                fractions.append(publisher.sent_fraction)
                weights.append(await clients[0].weight_checksums())
                await publisher.pause_engines()
                await trainer.call(train_request(training_samples, version - 1, num_updates=3))
            assert 0 < max(fractions) < 0.1
            assert weights[0] == weights[1] == weights[2]
            assert len(await clients[1].adapter_checksums()) == 2 * len(
                await clients[0].adapter_checksums()
            )

    asyncio.run(run())


@pytest.mark.parametrize("pause", ["wait", "keep"])
def test_requests_that_wait_for_an_adapter_are_sampled_from_it(
    slots, checkpoints, world1, training_samples, tmp_path, pause
):
    """By their version spans and by their log-probs; also those that were begun before, if held."""
    moe = slots["moe"]

    async def run():
        async with publishing(
            world1,
            checkpoints.moe,
            [moe],
            tmp_path,
            lora=ATTENTION,
            publish={"pause": pause},
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            [client] = clients
            long = asyncio.ensure_future(
                client.generate(PROMPTS[0].token_ids, adapter=ENGINE_ADAPTER, max_tokens=220)
            )
            await asyncio.sleep(0.3)
            await publisher.pause_engines()
            asked = asyncio.gather(
                *(
                    client.generate(prompt.token_ids, adapter=ENGINE_ADAPTER, max_tokens=8)
                    for prompt in PROMPTS
                )
            )
            await trainer.call(train_request(training_samples))
            assert not asked.done()
            await publisher.publish(2)
            completions = [completion for (completion,) in await asked]
            assert {span.version for c in completions for span in c.versions} == {2}
            directory = tmp_path / "asked"
            record_completions(
                directory, [(0, p, c) for p, c in zip(PROMPTS, completions, strict=True)]
            )
            found = await trainer.call(CompareLogprobs(directory))
            assert not found.problem and 0 < found.metrics["canary/abs_max"] <= TOLERANCE
            [begun] = await long
            versions = [span.version for span in begun.versions]
            assert versions == ([1, 2] if pause == "keep" else [1])

    asyncio.run(run())


def test_an_engine_that_comes_back_gets_weights_and_adapter(
    slots, checkpoints, world1, training_samples, tmp_path
):
    moe = slots["moe"]
    moe_tp2 = slots["moe_tp2"]

    async def run():
        async with publishing(world1, checkpoints.moe, [moe], tmp_path, lora=ATTENTION) as (
            publisher,
            trainer,
            _,
        ):
            await publisher.publish(1)
            await trainer.call(train_request(training_samples))
            await publisher.publish(2)
            async with moe_tp2.client() as client:
                other = weights_of(checkpoints.other_moe)  # as one that was started anew
                await WeightTrainer(other).publish([client], other, 0)
                await publisher.join(1, client)
                await assert_agree(publisher)
                assert not publisher.unchecked
                await trainer.call(train_request(training_samples, 1, num_updates=2))
                await publisher.publish(3)
                await assert_agree(publisher)
                (completion,) = await client.generate(
                    PROMPTS[0].token_ids, adapter=ENGINE_ADAPTER, max_tokens=4
                )
                assert [span.version for span in completion.versions] == [3]

    asyncio.run(run())


def test_an_engine_that_comes_back_gets_the_adapters_of_all_domains(
    slots, checkpoints, world2, tmp_path
):
    """Each domain's prompts are answered with its own, by an engine of one worker and by one of
    two."""
    samples = write_samples(tmp_path / "step_000001", vocab_size=256, num_domains=2)
    first = slots["domains"]
    second = slots["domains_tp2"]
    prompts = []
    for number, prompt in enumerate(PROMPTS):
        prompts.append(replace(prompt, domain=DOMAINS[number % 2]))

    async def agree(publisher) -> None:
        found = await publisher.check_logprobs(prompts)
        assert 0 < found["canary/abs_max"] <= TOLERANCE

    async def run():
        async with publishing(
            world2,
            checkpoints.moe,
            [first],
            tmp_path,
            layout={"tensor_parallel_size": 2},
            lora=BY_DOMAIN,
            domains=DOMAINS,
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            await agree(publisher)
            for version in (2, 3):
                await trainer.call(train_request(samples, version - 2, num_updates=3))
                await publisher.publish(version)
                await agree(publisher)
            one_token = {"max_tokens": 1, "temperature": 0.0}
            of_domains = []
            for domain in DOMAINS:
                [answer] = await clients[0].generate(
                    PROMPTS[0].token_ids, adapter=f"policy.{domain}", **one_token
                )
                of_domains.append(answer.logprobs[0])
            assert abs(of_domains[0] - of_domains[1]) > TOLERANCE
            async with second.client() as client:
                other = weights_of(checkpoints.other_moe)  # as one that was started anew
                await WeightTrainer(other).publish([client], other, 0)
                await publisher.join(1, client)
                await agree(publisher)
                assert not publisher.unchecked
                checksums = await client.adapter_checksums()
                assert {name.split("/")[1] for name in checksums} == set(DOMAINS)

    asyncio.run(run())


def test_magnitudes_of_dora_are_published_in_the_weights(
    slots, checkpoints, world2, training_samples, tmp_path
):
    """Tensor ranks compute the norms of rows together, then each sends what it is asked for."""
    moe = slots["moe"]
    moe_tp2 = slots["moe_tp2"]

    async def run():
        async with publishing(
            world2,
            checkpoints.moe,
            [moe, moe_tp2],
            tmp_path,
            layout={"tensor_parallel_size": 2},
            lora={"rank": 3, "dora": True},
        ) as (publisher, trainer, _):
            await publisher.publish(1)
            await assert_agree(publisher)
            for step in range(2):
                await trainer.call(train_request(training_samples, step, num_updates=2))
            await assert_differ(publisher)
            await publisher.publish(2)
            await assert_agree(publisher)

    asyncio.run(run())


def test_a_cold_start_publishes_its_weights_and_then_adapters_begin(
    slots, checkpoints, world1, training_samples, tmp_path
):
    moe = slots["moe"]

    async def run():
        async with publishing(
            world1,
            checkpoints.moe,
            [moe],
            tmp_path,
            lora=ATTENTION,
            cold_start={"target_accuracy": 0.5, "max_steps": 5},
        ) as (publisher, trainer, _):
            await trainer.call(ResetOptimizer(cold_start=True))
            for update in range(2):
                await publisher.publish(0)
                await assert_agree(publisher)
                assert publisher.sent_fraction == 1
                directory = Path(training_samples)
                await trainer.call(TrainColdStart(directory=directory, first_update=update))
            await trainer.call(ResetOptimizer(cold_start=False))
            for step in range(2):
                await publisher.publish(step)
                await assert_agree(publisher)
                assert 0 < publisher.sent_fraction < 0.1
                await trainer.call(train_request(training_samples, step, num_updates=2))

    asyncio.run(run())


def test_a_tensor_without_a_layer_is_refused_by_name(slots, checkpoints, world1, tmp_path):
    """The server has slots beside attention only."""
    moe = slots["moe"]

    async def run():
        async with publishing(
            world1,
            checkpoints.moe,
            [moe],
            tmp_path,
            lora=ATTENTION | {"targets": ["experts"]},
        ) as (publisher, _, _):
            with pytest.raises(MismatchError) as caught:
                await publisher.publish(1)
        assert "model.layers.0.mlp.experts.0." in str(caught.value)
        assert "no layer of that name" in str(caught.value)

    asyncio.run(run())


def test_a_rank_above_the_slots_is_refused_by_name(slots, checkpoints, world1, tmp_path):
    moe = slots["moe"]

    async def run():
        async with publishing(
            world1, checkpoints.moe, [moe], tmp_path, lora=ATTENTION | {"rank": 9}
        ) as (publisher, _, _):
            with pytest.raises(MismatchError, match="its rank is 9, and the engine's"):
                await publisher.publish(1)

    asyncio.run(run())


def test_a_changed_byte_of_an_adapter_is_found(slots, checkpoints, world1, tmp_path):
    moe = slots["moe"]

    async def run():
        async with publishing(world1, checkpoints.moe, [moe], tmp_path, lora=ATTENTION) as (
            publisher,
            trainer,
            _,
        ):
            await publisher.publish(1)
            await trainer.run("flip_a_bit", rank=0)
            with pytest.raises(MismatchError, match=r"reached worker 0 .* changed.*lora_"):
                await publisher.publish(2)

    asyncio.run(run())
