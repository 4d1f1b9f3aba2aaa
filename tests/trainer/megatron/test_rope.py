"""Rotary frequencies of every scaling are those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import rope_fields
from grpo_megatron.trainer.megatron.rope import rotary

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (
            5e5,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),  # Llama 3.3
        (
            1e4,
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (1e4, {"rope_type": "linear", "factor": 2.5}),
        (1e6, YARN),  # Qwen3
        (1e6, YARN | {"attention_factor": 0.8}),
        (
            1.5e5,
            YARN | {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        ),
        (1.5e5, YARN | {"truncate": None, "original_max_position_embeddings": 4096}),
        (5e4, YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        (1e4, YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}),
        (1e4, YARN | {"mscale": 0.7}),
        (1e2, YARN | {"original_max_position_embeddings": 8}),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies(theta, scaling, head_dim):
    config = LlamaConfig(
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=dict(scaling),
        max_position_embeddings=131072,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = rope_fields({"rope_theta": theta, "rope_scaling": scaling}, family_of("llama"))
    found = rotary(rope, head_dim)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
    assert found[1] == factor


def test_part_of_the_head():
    rope = rope_fields({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, family_of("glm4_moe"))
    frequencies, factor = rotary(rope, 64)
    assert frequencies.tolist() == pytest.approx([10 ** (-i / 4) for i in range(16)])
    assert factor == 1.0
