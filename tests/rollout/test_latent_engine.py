"""A real server of a tiny DeepSeek-V3 whose config.json transformers wrote: latent attention with
YaRN, grouped top-k, shared experts, a dense layer, routes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.family_models import reference_model, write_checkpoint
from tests.rollout.engines import Server, Trainer, logprob_error, weights_of

pytestmark = [pytest.mark.engine, pytest.mark.families]

PROMPTS = [
    [(7 * i) % 90 + 3 for i in range(first, first + length)] for first, length in ((3, 37), (5, 50))
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("latent")
    for seed in (0, 1):
        write_checkpoint(root / str(seed), "deepseek_v3", config_of_transformers=True, seed=seed)
    return root / "0", root / "1"


@pytest.fixture(scope="module")
def models(checkpoints):
    return [reference_model(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    started = Server.start(
        "latent",
        checkpoints[0],
        tmp_path_factory.mktemp("logs"),
        record_routes=True,
        deterministic=True,
    )
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def _reference_routes(model, prompt, completion) -> np.ndarray:
    """Sorted experts `[T_p + T - 1, sparse layers, K]` of transformers' own router."""
    import torch

    chosen = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [
        gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates
    ]
    with torch.no_grad():
        model(torch.tensor([[*prompt, *completion.token_ids.tolist()]]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, 1).numpy()[:-1], -1)


def test_log_probs_and_routes_are_transformers(server, models):
    """Cold, with prompts from the prefix cache, and after a publish of other weights."""

    async def run():
        async with server.client() as client:

            async def sample() -> list:
                return [
                    (prompt, completion)
                    for prompt in PROMPTS
                    for completion in await client.generate(
                        prompt, n=3, max_tokens=24, seed=1, record_routes=True
                    )
                ]

            cold, cached = await sample(), await sample()
            weights = weights_of(server.checkpoint.with_name("1"))
            await Trainer(weights).publish([client], weights, 1)
            return cold, cached, await sample()

    cold, cached, published = asyncio.run(run())
    for samples, model in ((cold, models[0]), (cached, models[0]), (published, models[1])):
        for prompt, completion in samples:
            assert logprob_error(model, prompt, completion) < TOLERANCE
            expected = _reference_routes(model, prompt, completion)
            sparse = completion.routes[:, -expected.shape[1] :]  # the first layer is dense
            np.testing.assert_array_equal(np.sort(sparse, -1), expected)
    for (_, one), (_, other) in zip(cold, cached, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
