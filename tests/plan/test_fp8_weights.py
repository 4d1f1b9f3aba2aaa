"""Engines that keep weights in FP8: what they read, what fits, what it saves."""

from __future__ import annotations

import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.devices import DEFAULT_DEVICE
from grpo_megatron.plan.fp8_weights import FP8_RULES, is_quantised, published_weights
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.timing.constants import shipped_constants
from grpo_megatron.plan.timing.prediction import LengthOptions, lengths_of, predict_run
from tests.trainer.families import MODELS

FP8 = "rollout.fp8=blockwise"
BLOCKWISE = RolloutConfig(fp8="blockwise")


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("decoder.layers.11.self_attention.linear_qkv.weight", True),
        ("decoder.layers.0.self_attention.linear_kv_down_proj.weight", True),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight12", True),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", True),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", False),
        ("decoder.layers.0.self_attention.linear_qkv.bias", False),
        ("decoder.layers.0.mlp.router.weight", False),
        ("embedding.word_embeddings.weight", False),
        ("output_layer.weight", False),
        ("visual.blocks.0.mlp.linear_fc1.weight", False),
    ],
)
def test_matrices_of_layers_are_quantised(parameter, expected):
    assert is_quantised(parameter) is expected


def test_routers_are_named_as_those_that_stay():
    mixtral = MODELS["mixtral"]
    config = published_weights(BLOCKWISE, mixtral)["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    layers = range(mixtral["num_hidden_layers"])
    wanted = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in layers]
    assert config["modules_to_not_convert"] == wanted
    dense = published_weights(BLOCKWISE, MODELS["llama"])["quantization_config"]
    assert dense["modules_to_not_convert"] == []


def test_an_engine_reads_what_is_published_whatever_the_checkpoint_is():
    released = load_preset("deepseek-v3").hf | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        }
    }
    assert published_weights(RolloutConfig(), released) == {"quantization_config": None}
    assert published_weights(RolloutConfig(), MODELS["llama"]) == {}
    assert published_weights(BLOCKWISE, released)["quantization_config"]["fmt"] == "e4m3"


@pytest.mark.parametrize(
    ("recipe", "overrides", "told"),
    [
        ("dense/qwen2.5-7b", ["trainer.tensor_parallel_size=4"], None),
        ("moe/qwen3-30b-a3b", [], None),
        ("moe/deepseek-v3", [], None),
        ("moe/glm-4.5", [], "width of shared experts on a worker is 1536 / 8 = 192"),
        (
            "moe/qwen3-30b-a3b",
            ["rollout.num_replicas=1", "rollout.tensor_parallel_size=4"],
            "expert width on a worker is 768 / 4 = 192",
        ),
        ("demo/gspo-moe-cpu", [], "the width of keys on a worker is 64"),
        ("systems/vlm_r1", [], "vLLM would expect it in FP8"),
        ("moe/qwen3-30b-a3b", ["rollout.dtype=float32"], "activations in bfloat16 only"),
        ("moe/qwen3-30b-a3b", ["publish.method=file"], "weights go through files"),
        (
            "moe/qwen3-30b-a3b-lora",
            ["lora.publish=adapter"],
            "engines that keep their weights in FP8 get adapters in these",
        ),
    ],
)
def test_what_cannot_be_in_fp8_is_refused(recipe, overrides, told):
    if told is None:
        assert resolve(recipe, [FP8, *overrides]).config.rollout.fp8 == "blockwise"
        return
    with pytest.raises(ConfigError) as error:
        resolve(recipe, [FP8, *overrides])
    assert told in str(error.value)


def test_a_layout_that_would_do_is_named():
    with pytest.raises(ConfigError) as error:
        resolve("moe/glm-4.5", [FP8])
    assert "divide it by 4 (rollout.tensor_parallel_size), or set" in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve("dense/qwen2.5-7b", [FP8, "trainer.tensor_parallel_size=8"])
    assert "trainer.tensor_parallel_size" in str(error.value)
    with pytest.raises(ConfigError) as error:
        resolve("demo/gspo-moe-cpu", [FP8])
    assert "divide it by" not in str(error.value)


def test_a_width_is_told_once():
    """Also of latent attention, whose keys and values the rules of engine and trainer both need."""
    latent = facts_from_hf(MODELS["deepseek_v3"])
    run = resolve("dense/qwen3-8b").config
    rollout = run.rollout.model_copy(update={"tensor_parallel_size": 2})
    messages = []
    for violation in FP8_RULES.violations(
        run.model_copy(update={"rollout": rollout}), latent, config=run
    ):
        messages.append((violation.message, *violation.related))
    assert len(messages) == len(set(messages)) > 3


@pytest.mark.parametrize("argument", ["--quantization=fp8_per_block", "-q"])
def test_engines_do_not_quantise_by_themselves(argument):
    with pytest.raises(ConfigError, match=r"as they are published") as error:
        resolve("dense/qwen3-8b", [f'rollout.engine_arguments=["{argument}"]'])
    assert "rollout.fp8 = 'blockwise'" in str(error.value)


def test_the_canary_allows_for_rounding():
    config = resolve("dense/qwen3-8b", [FP8]).config
    assert config.canary_tolerance == 0.3
    assert resolve("dense/qwen3-8b").config.canary_tolerance == 0.1


def test_what_it_saves_is_planned():
    """Of DeepSeek-V3 nearly half of the engine's weights and of a publish."""
    config = resolve("moe/deepseek-v3").config
    in_fp8 = resolve("moe/deepseek-v3", [FP8]).config
    plan, plan_in_fp8 = plan_of(config), plan_of(in_fp8)
    assert 0.5 < plan_in_fp8.engine["weights"] / plan.engine["weights"] < 0.52
    assert 0.5 < plan_in_fp8.numbers["publish_bytes"] / plan.numbers["publish_bytes"] < 0.51
    assert plan_in_fp8.engine["kv_tokens"] > 1.5 * plan.engine["kv_tokens"]
    assert plan_in_fp8.numbers["checkpoint_bytes"] == plan.numbers["checkpoint_bytes"]
    constants = shipped_constants()
    lengths = lengths_of(config, LengthOptions(), constants)
    before = predict_run(config, plan, DEFAULT_DEVICE, constants, lengths)
    after = predict_run(in_fp8, plan_in_fp8, DEFAULT_DEVICE, constants, lengths)
    assert after.generation_s < 0.8 * before.generation_s
    assert after.publish_s < 0.6 * before.publish_s
