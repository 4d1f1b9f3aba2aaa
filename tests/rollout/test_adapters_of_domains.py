"""One engine with adapters of several domains, all published in one transfer.

gloo and CPU kernels: this says nothing about the kernels that a GPU computes adapters with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.types import Completion
from grpo_megatron.weights.adapter_names import published_name
from tests.rollout.engines import (
    Server,
    Trainer,
    Weights,
    logprob_error,
    make_adapter,
    make_checkpoint,
    reference,
    weights_of,
)
from tests.rollout.servers import DUMMY

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

LORA = LoraConfig(rank=3, alpha=5, publish="adapter", per_domain=True)
MATH, CODE = "math", "code, easy/hard"
PROMPTS = [tuple((7 * j + i) % 256 for j in range(3, 40 + 8 * i)) for i in range(3)]
"""Longer than a block of keys and values, which the engine keeps for the next request."""
LAYOUTS = {"one worker": {}, "two workers": {"tensor_parallel_size": 2}}


@dataclass
class Started:
    checkpoint: Path
    weights: Weights
    server: Server

    def adapter_of(self, domain: str) -> str:
        return self.server.config.engine_adapter_of(domain)


@pytest.fixture(scope="module", params=LAYOUTS)
def started(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("domains")
    checkpoint = make_checkpoint(root / "dense", moe=False, seed=2)
    options = DUMMY | LAYOUTS[request.param]
    server = Server.start("domains", checkpoint, root, LORA, domains=(MATH, CODE), **options)
    try:
        server.wait()
        yield Started(checkpoint, weights_of(checkpoint), server)
    finally:
        server.stop()


def in_one_publish(adapters: Mapping[str, Weights]) -> Weights:
    """The tensors of the adapters of all domains, as they are published."""
    found = {}
    for domain, tensors in adapters.items():
        for name, tensor in tensors.items():
            found[published_name(domain, name)] = tensor
    return found


async def publish(client: EngineClient, adapters: Mapping[str, Weights], version: int) -> None:
    tensors = in_one_publish(adapters)
    await Trainer(tensors).publish([client], tensors, version, LORA)


async def sample(client: EngineClient, adapters: Sequence[str]) -> list[list[Completion]]:
    """Every prompt from every adapter, all at once; by adapter, then by prompt."""
    requests = []
    for adapter in adapters:
        for prompt in PROMPTS:
            requests.append(client.generate(prompt, adapter=adapter, max_tokens=12))
    answers = [completion for (completion,) in await asyncio.gather(*requests)]
    found = []
    for first in range(0, len(answers), len(PROMPTS)):
        found.append(answers[first : first + len(PROMPTS)])
    return found


async def greedy(client: EngineClient, adapter: str) -> list[Completion]:
    """One request after the other, so that each is a batch of its own."""
    found = []
    for prompt in PROMPTS:
        found += await client.generate(prompt, adapter=adapter, max_tokens=12, temperature=0.0)
    return found


def assert_computes(model: torch.nn.Module, completions: Sequence[Completion]) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert logprob_error(model, prompt, completion) < 1e-4


def is_bit_equal(ones: Sequence[Completion], others: Sequence[Completion]) -> bool:
    for one, other in zip(ones, others, strict=True):
        if one.token_ids.tolist() != other.token_ids.tolist():
            return False
        if not np.array_equal(one.logprobs, other.logprobs):
            return False
    return True


def by_domain(checksums: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Checksums by domain, then by worker and layer."""
    found: dict[str, dict[str, str]] = {}
    for name, digest in checksums.items():
        worker, _, rest = name.partition("/")
        domain, _, layer = rest.rpartition("/")
        found.setdefault(domain, {})[f"{worker}/{layer}"] = digest
    return found


def test_every_request_gets_the_adapter_that_it_names(started):
    """In one batch, with requests of the weights alone; also where keys and values of the same
    prompt are kept, which were computed with another adapter."""
    of_math, math_model = make_adapter(started.checkpoint, LORA, seed=1)
    of_code, code_model = make_adapter(started.checkpoint, LORA, seed=2)
    models = [math_model, code_model, reference(started.checkpoint)]
    adapters = [started.adapter_of(MATH), started.adapter_of(CODE), ""]

    async def run():
        async with started.server.client() as client:
            await Trainer(started.weights).publish([client], started.weights, 1)
            before = await sample(client, adapters)
            await publish(client, {MATH: of_math, CODE: of_code}, 2)
            return before, await sample(client, adapters), await sample(client, adapters)

    before, *later = asyncio.run(run())
    for completions in before:
        assert_computes(models[-1], completions)
    for found in later:
        for model, completions in zip(models, found, strict=True):
            assert_computes(model, completions)
    first = zip(PROMPTS, later[0][0], strict=True)
    assert all(logprob_error(code_model, *pair) > 1e-2 for pair in first)


def test_an_adapter_that_stays_answers_as_before(started):
    """A publish brings both adapters, and one of them has changed."""
    of_code, _ = make_adapter(started.checkpoint, LORA, seed=2)
    math, code = started.adapter_of(MATH), started.adapter_of(CODE)

    async def run():
        found = []
        async with started.server.client() as client:
            await Trainer(started.weights).publish([client], started.weights, 1)
            for version in (2, 3):
                of_math, model = make_adapter(started.checkpoint, LORA, seed=10 + version)
                await publish(client, {MATH: of_math, CODE: of_code}, version)
                checksums = await client.adapter_checksums()
                answers = await greedy(client, math), await greedy(client, code)
                found.append((model, answers, by_domain(checksums)))
        return found

    found = asyncio.run(run())
    for model, (of_math, _), checksums in found:
        assert_computes(model, of_math)
        assert set(checksums) == {MATH, CODE}
        assert set(checksums[MATH]) == set(checksums[CODE])
    (_, before, first), (_, after, second) = found
    assert is_bit_equal(before[1], after[1]) and not is_bit_equal(before[0], after[0])
    assert first[CODE] == second[CODE]
    changed = {name for name, digest in first[MATH].items() if digest != second[MATH][name]}
    assert changed == set(first[MATH])


def test_weights_that_come_anew_forget_all_adapters(started):
    of_math, _ = make_adapter(started.checkpoint, LORA, seed=1)
    of_code, _ = make_adapter(started.checkpoint, LORA, seed=2)
    adapters = [started.adapter_of(MATH), started.adapter_of(CODE), ""]

    async def run():
        async with started.server.client() as client:
            await publish(client, {MATH: of_math, CODE: of_code}, 1)
            await Trainer(started.weights).publish([client], started.weights, 2)
            return await client.adapter_checksums(), await sample(client, adapters)

    checksums, found = asyncio.run(run())
    assert checksums == {}
    for completions in found:
        assert_computes(reference(started.checkpoint), completions)


def test_adapters_of_other_domains_are_refused(started):
    of_math, _ = make_adapter(started.checkpoint, LORA, seed=1)

    async def published(adapters: Mapping[str, Weights]) -> None:
        async with started.server.client() as client:
            await publish(client, adapters, 1)

    with pytest.raises(MismatchError, match="and not for 'law'"):
        asyncio.run(published({"law": of_math}))
    with pytest.raises(MismatchError, match="an adapter for each of the domains"):
        asyncio.run(published({"": of_math}))
    with pytest.raises(EngineError, match=f"no tensor came of the adapter of domain '{CODE}'"):
        asyncio.run(published({MATH: of_math}))
