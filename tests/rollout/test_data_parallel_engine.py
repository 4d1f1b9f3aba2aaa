"""Real servers of two data-parallel engines, which share the experts of a sparse model."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess

import numpy as np
import pytest

from grpo_megatron.config.lora import ENGINE_ADAPTER, LoraConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.network import Endpoint
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.replica import multi_node_arguments, serve_command
from grpo_megatron.weights.transfer import StreamSender
from tests.e2e.family_models import reference_model, write_checkpoint
from tests.rollout.engines import (
    Server,
    Trainer,
    logprob_error,
    make_adapter,
    make_checkpoint,
    make_config,
    reference,
    reference_routes,
    tensors_of,
    weights_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.families]

LATENT_PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 8, 21)]
PROMPTS = [[(7 * i + first) % 200 + 3 for i in range(20 + first)] for first in range(8)]
TWO_ENGINES = {
    "record_routes": True,
    "data_parallel_size": 2,
    "engine_arguments": ("--load-format", "dummy"),
}
LAYOUTS = {
    "experts_shared": {"expert_parallel": True},
    "columns_shared": {"expert_parallel": False},
    "tensor_parallel_too": {"expert_parallel": True, "tensor_parallel_size": 2},
}


class FlipsABit(StreamSender):
    """What it sends to the second worker changes after its digests were taken."""

    def __init__(self, number: int, *arguments, **named) -> None:
        super().__init__(number, *arguments, **named)
        if number == 1:
            self._intact = self._pack
            self._pack = self._flipped

    def _flipped(self, message, *arguments):
        data = self._intact(message, *arguments)
        data[message.offsets[0]] ^= 1
        self._pack = self._intact
        return data


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "moe", moe=True, seed=0)


def assert_computes(checkpoint, samples) -> None:
    model = reference(checkpoint)
    for prompt, completion in samples:
        assert logprob_error(model, prompt, completion) < 1e-4
        expected = reference_routes(model, prompt, completion)
        np.testing.assert_array_equal(np.sort(completion.routes, -1), expected)


async def sample(client, adapter: str = "") -> list:
    """Many requests at once, so that both engines have some."""
    requests = [
        client.generate(prompt, adapter=adapter, n=2, max_tokens=12, record_routes=True)
        for prompt in PROMPTS
    ]
    found = []
    for prompt, completions in zip(PROMPTS, await asyncio.gather(*requests), strict=True):
        found += [(prompt, completion) for completion in completions]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_worker_gets_what_it_keeps_and_proves_it(checkpoint, tmp_path, layout):
    server = Server.start("two", checkpoint, tmp_path, **TWO_ENGINES, **LAYOUTS[layout])
    weights = weights_of(checkpoint)

    async def run():
        async with server.client() as client:
            trainer = Trainer(weights)
            kept = await EngineControl([client]).kept_boxes(tensors_of(trainer.held))
            await trainer.publish([client], weights, 1)
            samples = await sample(client)
            with pytest.raises(MismatchError, match="tensors reached worker 1 of two changed"):
                await Trainer(weights, sender_class=FlipsABit).publish([client], weights, 2)
            return kept, samples

    try:
        server.wait()
        kept, samples = asyncio.run(run())
    finally:
        server.stop()
    assert len(kept) == server.config.rollout.num_workers
    experts = [{name for name in worker if ".experts." in name} for worker in kept]
    if server.config.rollout.expert_parallel:
        assert not experts[0] & experts[1]
    else:
        assert experts[0] == experts[1]
    assert_computes(checkpoint, samples)


def test_every_engine_computes_the_adapter(checkpoint, tmp_path):
    """Beside the attention, whose layers each engine has whole; the second adapter replaces the
    first in both."""
    lora = LoraConfig(rank=3, alpha=5, targets=("self_attn",), publish="adapter")
    server = Server.start("slots", checkpoint, tmp_path, lora, **TWO_ENGINES)
    weights = weights_of(checkpoint)

    async def run():
        found = []
        async with server.client() as client:
            await Trainer(weights).publish([client], weights, 1)
            for version in (2, 3):
                adapter, model = make_adapter(checkpoint, lora, seed=version)
                await Trainer(adapter).publish([client], adapter, version, lora)
                samples = await sample(client, ENGINE_ADAPTER)
                found.append((model, samples, await client.adapter_checksums()))
        return found

    try:
        server.wait()
        found = asyncio.run(run())
    finally:
        server.stop()
    for model, samples, checksums in found:
        for prompt, completion in samples:
            assert logprob_error(model, prompt, completion) < 1e-4
        of_first, of_second = (
            {name.partition("/")[2]: digest for name, digest in checksums.items() if name[0] == one}
            for one in "01"
        )
        assert of_first == of_second and len(of_first) == 2 * (6 + 2)


def test_layers_that_split_sequences(tmp_path):
    """DeepSeek's have a part of the tokens on each tensor-parallel worker, where data-parallel
    engines share experts; a step with one token, as of a request alone, has no parts."""
    checkpoint = tmp_path / "latent"
    write_checkpoint(checkpoint, "deepseek_v3_kernel", config_of_transformers=False)
    options = {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel": True}
    server = Server.start("latent", checkpoint, tmp_path, **options)

    async def run():
        async with server.client() as client:
            alone = [await client.generate(prompt, max_tokens=6) for prompt in LATENT_PROMPTS]
            requests = [client.generate(prompt, max_tokens=6) for prompt in LATENT_PROMPTS]
            return [*alone, *await asyncio.gather(*requests)]

    try:
        server.wait()
        answers = asyncio.run(run())
    finally:
        server.stop()
    model = reference_model(checkpoint)
    for prompt, [completion] in zip(2 * LATENT_PROMPTS, answers, strict=True):
        assert logprob_error(model, prompt, completion) < 1e-4


def test_engines_of_a_server_on_two_nodes(checkpoint, tmp_path):
    """As Slurm starts them: a part on each node, here both on this machine."""
    config = make_config(**TWO_ENGINES, expert_parallel=True)
    ports = [free_port(), free_port()]
    head = Endpoint("127.0.0.1", free_port())
    parts = []
    try:
        for node in range(2):
            argv, environment = serve_command(config, str(checkpoint), 0, ports[node], token="t")
            argv += multi_node_arguments(config.rollout, 2, node, head)
            with open(tmp_path / f"{node}.log", "w") as log:
                parts.append(
                    subprocess.Popen(
                        argv, env={**os.environ, **environment}, stdout=log, stderr=log
                    )
                )
        weights = weights_of(checkpoint)

        url = f"http://127.0.0.1:{ports[0]}"

        async def run():
            async with EngineClient(url, name="wide", token="t") as client:
                await client.wait_ready(1200, lambda: all(part.poll() is None for part in parts))
                await Trainer(weights).publish([client], weights, 1)
                return await sample(client)

        samples = asyncio.run(run())
    finally:
        for part in parts:
            part.terminate()
        for part in parts:
            part.wait(60)
    assert_computes(checkpoint, samples)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
