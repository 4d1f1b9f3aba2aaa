"""Released models: the facts add up to the published size, and their layouts obey every rule."""

from __future__ import annotations

import pytest

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import DataError
from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.model_facts import facts_from_hf

RELEASED = [name for name in preset_names() if load_preset(name).checkpoint]


def num_parameters(hf: dict) -> int:
    """Of all weights and selection biases that are trained or used, from the sizes alone."""
    f = model_fields(hf)
    hidden, heads = f["hidden_size"], f["num_attention_heads"]
    if "kv_lora_rank" in f:
        query = heads * (f["qk_nope_head_dim"] + f["qk_rope_head_dim"])
        rank, latent = f["q_lora_rank"], f["kv_lora_rank"]
        attention = (hidden + 1 + query) * rank if rank else hidden * query
        attention += hidden * (latent + f["qk_rope_head_dim"]) + latent
        attention += heads * (
            latent * (f["qk_nope_head_dim"] + f["v_head_dim"]) + f["v_head_dim"] * hidden
        )
    else:
        query, key = heads * f["head_dim"], f["num_key_value_heads"] * f["head_dim"]
        attention = 2 * hidden * (query + key)
        has_bias = f["model_type"] in ("qwen2", "qwen2_5_vl") or f.get("attention_bias")
        has_norm = f["model_type"].startswith("qwen3") or f.get("use_qk_norm")
        attention += (query + 2 * key if has_bias else 0) + (2 * f["head_dim"] if has_norm else 0)
    experts, layers, num_moe = (
        f.get("num_experts") or 0,
        f["num_hidden_layers"],
        sum(f["moe_layers"]),
    )
    width = f.get("moe_intermediate_size") or f["intermediate_size"]
    sparse = 3 * hidden * (experts * width + (f["shared_expert_intermediate_size"] or 0))
    sparse += experts * (hidden + ("routed_scaling_factor" in f))
    tables = 1 if f["tie_word_embeddings"] else 2
    seen = 0
    if "vision_config" in f:
        seen = TOWERS[f["model_type"]](f["vision_config"])
    return (
        num_moe * sparse
        + (layers - num_moe) * 3 * hidden * f["intermediate_size"]
        + layers * (attention + 2 * hidden)
        + hidden
        + tables * f["vocab_size"] * hidden
        + seen
    )


def num_parameters_of_tower(vision: dict) -> int:
    width, of_mlp = vision["hidden_size"], vision["intermediate_size"]
    attention = 4 * width * (width + 1)
    mlp = 3 * width * of_mlp + 2 * of_mlp + width
    pixels = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = width * vision["spatial_merge_size"] ** 2
    merger = width + merged * (merged + 1) + vision["out_hidden_size"] * (merged + 1)
    return pixels * width + vision["depth"] * (attention + mlp + 2 * width) + merger


def num_parameters_of_deep_tower(vision: dict) -> int:
    width, of_mlp = vision["hidden_size"], vision["intermediate_size"]
    attention = 4 * width * (width + 1)
    mlp = 2 * width * of_mlp + of_mlp + width
    pixels = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = width * vision["spatial_merge_size"] ** 2
    two_layers = merged * (merged + 1) + vision["out_hidden_size"] * (merged + 1)
    mergers = two_layers + 2 * width
    mergers += len(vision["deepstack_visual_indexes"]) * (two_layers + 2 * merged)
    patches = (pixels + 1 + vision["num_position_embeddings"]) * width
    return patches + vision["depth"] * (attention + mlp + 4 * width) + mergers


TOWERS = {
    "qwen2_5_vl": num_parameters_of_tower,
    "qwen3_vl": num_parameters_of_deep_tower,
    "qwen3_vl_moe": num_parameters_of_deep_tower,
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_sizes_give_the_number_of_parameters(name):
    preset = load_preset(name)
    assert num_parameters(preset.hf) == preset.checkpoint["parameters"]
    assert preset.name == name


@pytest.mark.parametrize("name", RELEASED)
def test_recommended_layouts_obey_every_rule(name):
    preset = load_preset(name)
    assert preset.layouts
    for layout in preset.layouts:
        trainer = TrainerConfig(**layout["trainer"])
        rollout = RolloutConfig(**layout["rollout"])
        facts = facts_from_hf(preset.hf)
        assert check_layout(Case(trainer, facts, rollout, cpu=False)) == []
        assert layout["gpus"] == (trainer.num_ranks + rollout.num_replicas * rollout.num_workers)


def test_a_released_model_is_not_started_at_random(tmp_path):
    from grpo_megatron.data.tiny_model import write_tiny_model

    with pytest.raises(DataError, match=r"download Qwen/Qwen3-8B and set model\.path"):
        write_tiny_model(tmp_path, load_preset("qwen3-8b"))
