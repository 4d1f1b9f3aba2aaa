"""A real server of a tiny Qwen2 with tied embeddings: an update reaches its output layer too."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.family_models import reference_model, write_checkpoint
from tests.rollout.engines import Server, Trainer, logprob_error, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.families]

PROMPT = [(7 * i) % 90 + 3 for i in range(20)]


def test_log_probs_after_a_publish_are_those_of_the_published_weights(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, checkpoint in enumerate((first, second)):
        write_checkpoint(checkpoint, "qwen2_tied", config_of_transformers=False, seed=seed)
    server = Server.start("tied", first, tmp_path)

    async def run():
        async with server.client() as client:
            before = await client.generate(PROMPT, n=2, max_tokens=16)
            weights = weights_of(second)
            await Trainer(weights).publish([client], weights, 1)
            return before, await client.generate(PROMPT, n=2, max_tokens=16)

    try:
        server.wait()
        before, after = asyncio.run(run())
    finally:
        server.stop()
    for checkpoint, completions in ((first, before), (second, after)):
        model = reference_model(checkpoint)
        for completion in completions:
            assert logprob_error(model, PROMPT, completion) < 1e-4
