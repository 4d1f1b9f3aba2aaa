"""One normaliser for the dialects of config.json."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.config.run import ModelConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.model_facts import facts_from_hf, model_facts

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
}


def test_dense():
    facts = facts_from_hf(DENSE)
    assert not facts.is_moe and facts.moe_layers == () and facts.has_dense_layers
    assert (facts.head_dim, facts.num_kv_heads) == (8, 2)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_names_of_the_expert_count(key):
    facts = facts_from_hf({**DENSE, key: 16, "num_experts_per_tok": 4})
    assert (facts.num_experts, facts.num_experts_per_token) == (16, 4)
    assert facts.moe_intermediate_size == 128, "Mixtral has one width for all"


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 1}, (1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 2]}, (1, 3)),
        ({"moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({"moe_layer_freq": 1, "first_k_dense_replace": 3}, (3,)),
    ],
)
def test_which_layers_have_experts(keys, layers):
    assert facts_from_hf({**DENSE, "num_experts": 8, **keys}).moe_layers == layers


def test_deepseek_shared_experts_and_latent_attention():
    facts = facts_from_hf(
        {
            **DENSE,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
        }
    )
    assert facts.is_mla and facts.shared_expert_intermediate_size == 64


def test_checkpoint_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert model_facts(ModelConfig(path=tmp_path)).num_heads == 8


@pytest.mark.parametrize("content", [None, "{", json.dumps({"hidden_size": 4})])
def test_bad_checkpoint_directories(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_facts(ModelConfig(path=tmp_path))


def test_preset():
    facts = model_facts(ModelConfig(preset="tiny-qwen3-moe"))
    assert (facts.num_experts, facts.num_experts_per_token, facts.num_layers) == (8, 2, 4)
    assert facts.vocab_size is None
