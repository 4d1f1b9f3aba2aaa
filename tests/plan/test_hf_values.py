"""Values of a config.json that no model has are refused by field, value and range."""

from __future__ import annotations

import json
import math

import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.resolve import resolve

MOE = "qwen3-30b-a3b"
DENSE = "qwen3-8b"
LATENT = "deepseek-v3"
PARTLY_ROTATED = "glm-4.5-air"


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        (MOE, {"num_experts_per_tok": 1000}, "num_experts_per_tok = 1000 of 128 experts"),
        (MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok = 0 of 128 experts"),
        (MOE, {"num_experts_per_tok": -1}, "num_experts_per_tok = -1 is no whole number"),
        (MOE, {"num_experts_per_tok": 2.5}, "num_experts_per_tok = 2.5 is no whole number"),
        (MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported for qwen3_moe"),
        (MOE, {"num_experts": "8"}, "num_experts = '8' is no whole number"),
        (MOE, {"num_experts": 0}, "num_experts = 0 is no whole number of at least 1"),
        (MOE, {"mlp_only_layers": 1}, "mlp_only_layers = 1 is no list of layers"),
        (MOE, {"mlp_only_layers": ["a"]}, r"mlp_only_layers = \['a'\] is no list of layers"),
        (MOE, {"norm_topk_prob": None}, "norm_topk_prob = null is not supported for qwen3_moe"),
        (LATENT, {"num_experts_per_tok": 1}, "= 1 is not supported for deepseek_v3"),
        (LATENT, {"num_experts_per_tok": 129}, "topk_group = 4 groups .* have 128"),
        (LATENT, {"topk_group": 0}, "topk_group = 0 of n_group = 8 groups"),
        (LATENT, {"routed_scaling_factor": "x"}, "routed_scaling_factor = 'x' is no number above"),
        (LATENT, {"routed_scaling_factor": math.nan}, "routed_scaling_factor = nan is no number"),
        (LATENT, {"num_nextn_predict_layers": 1.5}, "predict_layers = 1.5 is no whole number"),
        (LATENT, {"quantization_config": {"a": 1}}, "has no quant_method"),
        (LATENT, {"scoring_func": []}, r"scoring_func = \[\] is not supported for deepseek_v3"),
        (LATENT, {"n_group": 3}, "n_group = 3 does not divide the 256 experts"),
        (LATENT, {"topk_group": 1000}, "topk_group = 1000 of n_group = 8"),
        (LATENT, {"kv_lora_rank": -1}, "kv_lora_rank = -1 is no whole number"),
        (LATENT, {"v_head_dim": 0}, "v_head_dim = 0 is no whole number"),
        (LATENT, {"rope_scaling": "linear"}, "rope_scaling = 'linear' is no table"),
        (LATENT, {"quantization_config": "fp8"}, "quantization_config = 'fp8' is no table"),
        (DENSE, {"num_key_value_heads": 64}, "= 64 does not divide num_attention_heads = 32"),
        (DENSE, {"hidden_size": 0}, "hidden_size = 0 is no whole number of at least 1"),
        (DENSE, {"head_dim": None}, "head_dim = null is not supported for qwen3"),
        (DENSE, {"hidden_size": "8"}, "hidden_size = '8' is no whole number"),
        (DENSE, {"num_hidden_layers": 0}, "num_hidden_layers = 0 is no whole number"),
        (DENSE, {"num_hidden_layers": True}, "num_hidden_layers = True is no whole number"),
        (DENSE, {"tie_word_embeddings": "false"}, "= 'false' is neither true nor false"),
        (MOE, {"norm_topk_prob": 1}, "norm_topk_prob = 1 is neither true nor false"),
        (DENSE, {"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0 is no number above 0"),
        (DENSE, {"rope_parameters": {"rope_type": [1]}}, r"rope type \[1\] is not supported"),
        (DENSE, {"rope_parameters": {"rope_type": []}}, r"rope type \[\] is not supported"),
        (DENSE, {"rope_theta": -1}, "rope_theta = -1 is no number above 0"),
        (DENSE, {"rope_theta": "8"}, "rope_theta = '8' is no number above 0"),
        (DENSE, {"rope_theta": [1]}, r"rope_theta = \[1\] is no number above 0"),
        (DENSE, {"rms_norm_eps": -1}, "rms_norm_eps = -1 is no number above 0"),
        (DENSE, {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, and"),
    ],
)
def test_refused_values(preset, change, message):
    hf = {**load_preset(preset).hf, **change}
    with pytest.raises(ConfigError, match=message) as error:
        model_fields(hf, where="here/config.json")
    assert "here/config.json" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("factor", 0, "is no number above 0"),
        ("factor", "x", "is no number above 0"),
        ("factor", -2, "is no number above 0"),
        ("beta_fast", [1], "is no number above 0"),
        ("beta_slow", -1, "is no number above 0"),
        ("attention_factor", 0.0, "is no number above 0"),
        ("mscale", math.nan, "is no finite number"),
        ("mscale_all_dim", "x", "is no finite number"),
        ("original_max_position_embeddings", "x", "is no whole number of at least 1"),
        ("original_max_position_embeddings", -1, "is no whole number of at least 1"),
        ("original_max_position_embeddings", 4096.5, "is no whole number of at least 1"),
        ("original_max_position_embeddings", math.inf, "is no whole number of at least 1"),
        ("original_max_position_embeddings", True, "is no whole number of at least 1"),
        ("truncate", 0, "is neither true nor false"),
    ],
)
def test_refused_scaling(name, value, allowed):
    hf = load_preset(LATENT).hf
    changed = {**hf, "rope_scaling": {**hf["rope_scaling"], name: value}}
    with pytest.raises(ConfigError) as error:
        model_fields(changed)
    assert error.value.message == f"{name} = {value!r} {allowed}"


def test_a_number_of_positions_may_have_a_point():
    """As transformers takes it."""
    hf = load_preset(LATENT).hf
    scaling = {**hf["rope_scaling"], "original_max_position_embeddings": 4096.0}
    rope = model_fields({**hf, "rope_scaling": scaling})["rope"]
    positions = rope["original_max_position_embeddings"]
    assert positions == 4096 and isinstance(positions, int)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0, 4.0, "low_freq_factor = 0 is no number above 0"),
        (1.0, math.inf, "high_freq_factor = inf is no number above 0"),
        (4.0, 4.0, "high_freq_factor = 4.0 is not above low_freq_factor = 4.0"),
    ],
)
def test_refused_bands_of_frequencies(low, high, message):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ConfigError, match=message):
        model_fields({**load_preset(DENSE).hf, "rope_scaling": scaling})


@pytest.mark.parametrize("percent", ["x", -1, 0, 1.5, math.nan])
def test_refused_parts_of_a_head(percent):
    hf = load_preset(PARTLY_ROTATED).hf
    with pytest.raises(ConfigError, match="is no number above 0 and at most 1"):
        model_fields(hf | {"partial_rotary_factor": percent})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "the file has list, expected a table"),
        ("null", "the file has NoneType, expected a table"),
        ('{"model_type": "qwen3", "text_config": 3}', "text_config has int, expected a table"),
    ],
)
def test_files_of_no_model(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        resolve("dense/qwen3-8b", ["model.preset=null", f"model.path={tmp_path}"])
    assert str(tmp_path) in str(error.value)


def test_a_checkpoint_has_a_vocabulary(tmp_path):
    hf = load_preset(DENSE).hf
    (tmp_path / "config.json").write_text(json.dumps(hf | {"vocab_size": None}))
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        resolve("dense/qwen3-8b", ["model.preset=null", f"model.path={tmp_path}"])


def test_a_byte_order_mark_is_no_error(tmp_path):
    hf = load_preset(DENSE).hf
    (tmp_path / "config.json").write_text(json.dumps(hf), encoding="utf-8-sig")
    assert read_config(tmp_path)["hidden_size"] == hf["hidden_size"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('extends = "dense/qwen3-8b"\nname = "marked"\n', encoding="utf-8-sig")
    assert resolve(recipe).config.name == "marked"
