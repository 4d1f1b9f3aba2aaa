"""Names of parameters in both spellings, tensors without a parameter, and fp8 blocks."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.checkpoints.hf_import import dequantise
from grpo_megatron.errors import ConfigError
from grpo_megatron.weights.parameters import carried_names, resolve, rules_for
from tests.trainer.families import MODELS
from tests.trainer.vision import DEEP_VISION

LAYER = "decoder.layers.12."


@pytest.mark.parametrize(
    ("family", "fused", "plain"),
    [
        ("qwen2", "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("qwen3", "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (
            "mixtral",
            "mlp.experts.linear_fc1.weight7",
            "mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        (
            "glm4_moe",
            "mlp.experts.linear_fc2.weight31",
            "mlp.experts.local_experts.31.linear_fc2.weight",
        ),
        (
            "deepseek_v3",
            "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.q_layernorm.weight",
        ),
        (
            "deepseek_v2",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight",
        ),
    ],
)
def test_names_of_transformer_engine(family, fused, plain):
    rules = rules_for(family)
    assert resolve(rules, LAYER + fused) == resolve(rules, LAYER + plain)


def test_names_and_kinds():
    rules = rules_for("mixtral")
    assert resolve(rules, LAYER + "mlp.experts.local_experts.3.linear_fc1.weight") == (
        "gate_up",
        [
            "model.layers.12.block_sparse_moe.experts.3.w1.weight",
            "model.layers.12.block_sparse_moe.experts.3.w3.weight",
        ],
    )
    assert resolve(rules, "output_layer.weight") == ("vocab", ["lm_head.weight"])
    assert resolve(rules, LAYER + "self_attention.linear_qkv.weight")[0] == "qkv"
    assert resolve(rules, LAYER + "mlp.router.weight")[0] == "copy"


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.x.mlp.router.weight",
        "mtp.layers.0.enorm.weight",
        "decoder.layers.0.mlp.router.weight.more",
    ],
)
def test_a_parameter_without_a_rule(name):
    with pytest.raises(ConfigError, match="no Hugging Face name"):
        resolve(rules_for("deepseek_v3"), name)


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_after_the_last_are_carried_along(name):
    hf = MODELS["deepseek_v3"] | {name: 1}
    tensors = {f"model.layers.{layer}.eh_proj.weight" for layer in (3, 4, 5)}
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert carried_names(hf, tensors | {rotary, "lm_head.weight"}) == {
        "model.layers.4.eh_proj.weight",
        rotary,
    }
    assert carried_names(MODELS["deepseek_v3"], tensors) == set()


def test_names_of_a_family_with_prefixes_of_its_own():
    rules = rules_for("qwen3_vl")
    text = "model.language_model."
    assert resolve(rules, "embedding.word_embeddings.weight") == (
        "vocab",
        [f"{text}embed_tokens.weight"],
    )
    assert resolve(rules, "decoder.layers.3.self_attention.q_layernorm.weight") == (
        "copy",
        [f"{text}layers.3.self_attn.q_norm.weight"],
    )
    of_tower = "deepstack_merger_list.0.linear_fc1.weight"
    assert resolve(rules, f"visual.{of_tower}") == ("copy", [f"model.visual.{of_tower}"])
    assert resolve(rules, "output_layer.weight") == ("vocab", ["lm_head.weight"])
    rotary = f"{text}layers.0.self_attn.rotary_emb.inv_freq"
    others = {"model.layers.0.self_attn.rotary_emb.inv_freq", f"{text}layers.9.eh_proj.weight"}
    assert carried_names(DEEP_VISION, {rotary, *others}) == {rotary}


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 129), (257, 5)])
def test_fp8_blocks(shape):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    found = dequantise(weight, scales, torch.float32)
    for row in range(0, shape[0], 50):
        for column in range(shape[1]):
            expected = float(weight[row, column].float()) * scales[row // 128, column // 128]
            assert found[row, column] == expected
    assert dequantise(weight, scales).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="has scales of shape"):
        dequantise(weight, scales[:, :-1])
