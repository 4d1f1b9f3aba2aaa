"""Truncated sampling on a real engine: the trainer's log-probs over the kept ids are its."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.rollout.chunk_sampling import ChunkSampler
from grpo_megatron.trainer.requests import CompareLogprobs
from tests.integration.conftest import TOLERANCE, publishing
from tests.integration.test_publish import PROMPTS

pytestmark = pytest.mark.engine

TRUNCATIONS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "segment_tokens": 5},
]


def truncating(config: RunConfig, **settings) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=settings)})


def test_the_trainers_logprobs_are_the_engines(servers, checkpoints, world1, tmp_path):
    async def run():
        async with publishing(
            world1, checkpoints.moe, [servers.moe], tmp_path, temperature=0.7
        ) as (publisher, trainer, clients):
            await publisher.publish(1)
            for settings in TRUNCATIONS:
                worker = ChunkSampler(truncating(publisher.config, **settings), publisher.engines)
                rollouts, plain = await asyncio.gather(  # one wants no log-probs but the sampled
                    worker.rollouts(0, PROMPTS, num_samples=6),
                    clients[0].generate(PROMPTS[0].token_ids, n=4, max_tokens=40),
                )
                assert {len(completion.logprobs) for completion in plain} == {40}
                pairs = [(g.prompt, c) for g in rollouts for c in g.completions]
                sizes = np.concatenate([c.kept.sizes for _, c in pairs])
                assert sizes.min() > 0 and sizes.mean() > 1.5
                assert sizes.max() <= settings.get("top_k", 255)
                record_completions(tmp_path / "truncated", [(0, *pair) for pair in pairs])
                found = await trainer.call(CompareLogprobs(tmp_path / "truncated"))
                assert not found.problem and found.metrics["canary/abs_max"] < TOLERANCE
                record_completions(
                    tmp_path / "without",
                    [(0, prompt, replace(c, kept=None)) for prompt, c in pairs],
                )
                without = await trainer.call(CompareLogprobs(tmp_path / "without"))
                assert f"of {len(sizes)} tokens," in without.problem
                assert without.metrics["canary/abs_mean"] > 0.05
            await publisher.check_logprobs(PROMPTS)  # samples from everything
            greedy = await worker.greedy(PROMPTS, 8)
            assert all(group.completions[0].kept is None for group in greedy)

    asyncio.run(run())
