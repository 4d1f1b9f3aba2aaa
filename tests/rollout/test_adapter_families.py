"""The families whose layers vLLM computes adapters for, by Hugging Face's names."""

from __future__ import annotations

import asyncio

import pytest

from grpo_megatron.config.lora import ENGINE_ADAPTER, LoraConfig
from tests.e2e.family_models import write_checkpoint
from tests.rollout.engines import (
    Server,
    Trainer,
    logprob_error,
    make_adapter,
    reference,
    weights_of,
)
from tests.rollout.servers import DUMMY

pytestmark = [pytest.mark.engine, pytest.mark.families]

DENSE = ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = ("shared_experts",)
FAMILIES = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "seed_oss": DENSE,
    "mixtral": ("self_attn",),
    "glm4_moe": DENSE + SHARED,
}
PROMPT = [(7 * i) % 90 for i in range(3, 20)]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_computes_the_adapter_of_a_family(tmp_path, name):
    lora = LoraConfig(rank=3, alpha=5, targets=FAMILIES[name], publish="adapter")
    checkpoint = tmp_path / "model"
    write_checkpoint(checkpoint, name, config_of_transformers=False)
    weights = weights_of(checkpoint)
    adapter, model = make_adapter(checkpoint, lora)
    server = Server.start(name, checkpoint, tmp_path, lora, max_model_len=64, **DUMMY)

    async def run():
        async with server.client() as client:
            await Trainer(weights).publish([client], weights, 1)
            await Trainer(adapter).publish([client], adapter, 2, lora)
            return await client.generate(PROMPT, adapter=ENGINE_ADAPTER, max_tokens=16)

    try:
        server.wait()
        [completion] = asyncio.run(run())
    finally:
        server.stop()
    assert logprob_error(model, PROMPT, completion) < 1e-4
    assert logprob_error(reference(checkpoint), PROMPT, completion) > 1e-2
