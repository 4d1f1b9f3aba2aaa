"""The inventories agree with transformers; what is not in them, or not computed, is refused."""

from __future__ import annotations

import json
import shutil

import pytest

from grpo_megatron.errors import ConfigError
from grpo_megatron.plan import family
from grpo_megatron.plan.family import family_names, family_of
from grpo_megatron.plan.hf_config import (
    as_transformers_reads,
    computation,
    derived,
    engine_overrides,
    flattened,
    model_fields,
    rope_fields,
    unified,
)
from tests.trainer.families import MODELS
from tests.trainer.vision import (
    DEEP_PROCESSOR,
    DEEP_VISION,
    PROCESSOR,
    SPARSE_VISION,
    VISION,
)

LACKING = ("gpt_oss", "minimax_m2", "qwen3_next")
SEEING = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
"""Held against transformers by samples with images, in `tests/trainer/test_vision.py`,
`test_deep_vision.py` and `test_sparse_vision.py`."""
OTHERS = [name for name in family_names() if name not in (*LACKING, *SEEING)]
FAMILIES = [name for name in OTHERS if not family_of(name).same_code_as]
"""Others are known to transformers by another name, as Kimi-K2 is."""
LLAMA = MODELS["llama"]
_BESIDE_CONFIG = {
    "qwen2_5_vl": {"image_processor": PROCESSOR},
    "qwen3_vl": {"image_processor": DEEP_PROCESSOR},
    "qwen3_vl_moe": {"image_processor": DEEP_PROCESSOR},
}
"""What `read_config` finds in other files."""
SHAPES = MODELS | {
    "qwen2_5_vl": VISION | _BESIDE_CONFIG["qwen2_5_vl"],
    "qwen3_vl": DEEP_VISION | _BESIDE_CONFIG["qwen3_vl"],
    "qwen3_vl_moe": SPARSE_VISION | _BESIDE_CONFIG["qwen3_vl_moe"],
}


def _defaults(model_type: str, **given: int) -> dict:
    """What transformers' class of the family takes for every field that is not given."""
    from transformers import CONFIG_MAPPING

    return json.loads(CONFIG_MAPPING[model_type](**given).to_json_string(use_diff=False))


def _refusal(hf: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        model_fields(hf)
    return str(caught.value)


@pytest.mark.parametrize("name", FAMILIES + SEEING)
def test_every_field_of_transformers_is_in_the_inventory(name):
    fields = unified(_defaults(name))
    assert set(fields) - family_of(name).fields.known == set()


@pytest.mark.parametrize("name", FAMILIES + SEEING)
def test_defaults_are_those_of_transformers(name):
    inventory, theirs = family_of(name).fields, unified(_defaults(name))
    partial = (theirs.get("rope_parameters") or {}).get("partial_rotary_factor")
    theirs.setdefault("partial_rotary_factor", partial)
    for field, value in inventory.default.items():
        assert theirs[field] == value, field
    for field, allowed in inventory.fixed.items():
        value = theirs.get(field)
        for item in value if isinstance(value, list) else [value]:
            assert item is None or item in allowed, field


NOT_COMPUTED = {"max_position_embeddings", "vocab_size", "num_nextn_predict_layers"}
"""Optional fields that no log-prob depends on: presets leave the first two to the tokenizer, and
the layers of the last are not run."""


@pytest.mark.parametrize("name", FAMILIES)
def test_what_may_be_missing_is_then_what_transformers_takes(name):
    """A field that transformers has a value for is required, or has that as its default here, or
    is derived alike: also at sizes that are not those of the class."""
    inventory = family_of(name).fields
    theirs = unified(_defaults(name, hidden_size=960, num_attention_heads=5))
    may_be_missing = set(inventory.optional) - set(inventory.required) - set(inventory.default)
    for field in may_be_missing - NOT_COMPUTED:
        without = derived({**theirs, field: None})
        assert theirs.get(field) in (None, without.get(field)), field


def test_every_family_has_a_shape():
    """By which layouts, engines and conversion are held against transformers."""
    assert {hf["model_type"] for hf in MODELS.values()} == set(OTHERS)


def test_every_family_goes_through_the_engine():
    """Through the real command, and part by part where an engine keeps a part of the weights."""
    from tests.e2e.family_models import settings_of
    from tests.e2e.test_families import CASES
    from tests.rollout.test_kept_boxes import DENSE, SPARSE

    trained = {settings_of(name)["model_type"] for name, _, _ in CASES}
    kept = {settings_of(name)["model_type"] for name in (*DENSE, *SPARSE)}
    assert trained == kept == set(OTHERS)


def test_an_unknown_family_is_told_those_that_are_computed():
    with pytest.raises(ConfigError, match="model_type 'zebra' is not supported") as error:
        family_of("zebra")
    assert "qwen3_moe" in error.value.remedy and "gpt_oss" not in error.value.remedy


@pytest.mark.parametrize(
    "name", [n for n in SHAPES if SHAPES[n]["model_type"] in FAMILIES + SEEING]
)
def test_both_spellings_say_the_same(name):
    """As authors write it, and as transformers 5 writes it after reading that."""
    from transformers import AutoConfig

    hf = SHAPES[name]
    config = AutoConfig.for_model(
        hf["model_type"], **{key: value for key, value in hf.items() if key != "model_type"}
    )
    written = flattened({**json.loads(config.to_json_string()), **_BESIDE_CONFIG.get(name, {})})
    assert "rope_parameters" in written and "rope_theta" not in written
    ours, theirs = model_fields(hf), model_fields(written)
    vision = ours.pop("vision_config", {})  # transformers adds defaults to a table of tables
    for field, value in vision.items():
        assert field == "model_type" or theirs["vision_config"][field] == value, field
    known = family_of(hf["model_type"]).fields
    for field in ours.keys() & theirs.keys() - {*known.ignored, *known.rope}:
        assert ours[field] == theirs[field], field


def test_a_text_has_a_table_of_its_own_where_transformers_reads_it_there():
    flat = flattened(DEEP_VISION)
    assert "text_config" not in flat
    assert as_transformers_reads(flat) == DEEP_VISION
    assert as_transformers_reads(DEEP_VISION) == DEEP_VISION
    assert as_transformers_reads(VISION) == VISION


def _beside(hf: dict, **fields) -> dict:
    """A config.json with its text in a table, and these fields beside it, too."""
    flat = flattened(hf)
    names = ("model_type", "vision_config")
    text = {name: value for name, value in flat.items() if name not in names}
    text.pop("tie_word_embeddings")
    return {name: flat[name] for name in names} | {"text_config": text} | fields


@pytest.mark.parametrize("hf", [VISION, DEEP_VISION], ids=["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 1e-3), ("rope_theta", 777.0), ("num_hidden_layers", 1), ("rope_scaling", {})],
)
def test_a_field_beside_a_text_that_says_something_else_is_refused(hf, field, value):
    """transformers reads the text's."""
    both = _beside(hf, **{field: value})
    with pytest.raises(ConfigError, match=f"{field} = .* stands beside text_config") as caught:
        flattened(both, where="here/config.json")
    assert caught.value.where == "here/config.json"
    same = both | {field: both["text_config"][field]}
    assert flattened(same)[field] == both["text_config"][field]
    assert flattened(both | {field: None})[field] == both["text_config"][field]


def test_fields_beside_a_text_may_differ_where_they_change_nothing():
    """And the table of rotary embeddings is one that transformers 4 wrote before and after it
    renamed its type."""
    renamed = {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]}
    both = _beside(VISION, torch_dtype="float16", use_cache=False, rope_scaling=renamed)
    both["text_config"] |= {"torch_dtype": "bfloat16", "use_cache": True}
    assert flattened(both)["torch_dtype"] == "float16"


@pytest.mark.parametrize("hf", [VISION, DEEP_VISION, SPARSE_VISION])
@pytest.mark.parametrize(
    ("field", "inside"),
    [("vocab_size", 112), ("max_position_embeddings", 256), ("attention_dropout", 0.0)],
)
def test_sizes_that_a_model_got_after_its_training_are_those_of_its_text(hf, field, inside):
    """As those of resized embeddings; transformers reads the text's."""
    from transformers import AutoConfig

    both = _beside(hf, **{field: 96})
    both["text_config"][field] = inside
    given = {name: value for name, value in both.items() if name != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **json.loads(json.dumps(given)))
    assert getattr(config.text_config, field) == inside
    assert flattened(both)[field] == inside
    both["text_config"][field] = None
    assert flattened(both)[field] == 96


@pytest.mark.parametrize(("field", "beside"), [("num_key_value_heads", 2), ("rope_theta", 777.0)])
def test_a_null_of_a_text_is_not_what_stands_beside_it(field, beside):
    """transformers takes as many heads as of queries, and its own theta."""
    both = _beside(VISION, **{field: beside})
    both["text_config"][field] = None
    with pytest.raises(ConfigError, match="stands beside text_config, where it is None"):
        flattened(both)


@pytest.mark.parametrize("hf", [VISION, DEEP_VISION, SPARSE_VISION])
@pytest.mark.parametrize("outside", [None, True, False])
@pytest.mark.parametrize("inside", [None, True, False])
def test_embeddings_are_tied_where_transformers_ties_them(hf, outside, inside):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    both = _beside(hf)
    if outside is not None:
        both["tie_word_embeddings"] = outside
    if inside is not None:
        both["text_config"]["tie_word_embeddings"] = inside
    fields = {name: value for name, value in both.items() if name != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **json.loads(json.dumps(fields)))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert flattened(both)["tie_word_embeddings"] is is_tied


def test_unknown_families_and_those_that_megatron_lacks():
    assert "known families: qwen3" in _refusal({"model_type": "qwen33"})
    for name in LACKING:
        assert "is not supported: " in _refusal({"model_type": name})
    assert "packed sequences" in _refusal({"model_type": "qwen3_next"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_biass": True}, "did you mean 'attention_bias'"),
        ({"final_logit_softcapping": 30.0}, "may change what the model computes"),
        ({"attention_bias": True}, "attention_bias = True is not supported for llama"),
        ({"hidden_act": "gelu"}, "supported: silu"),
        ({"num_experts": 4}, "llama has no field 'num_experts'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"partial_rotary_factor": 0.5}, "no field 'partial_rotary_factor'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
            "weight_block_size = [64, 128]",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "needs original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "unknown parameter: beta"),
        (
            {
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
                "rope_scaling": None,
            },
            "rotates whole heads",
        ),
        ({"rope_theta": None, "rope_scaling": None}, "neither rope_theta nor rope_parameters"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "rope_parameters and rope_scaling say different things",
        ),
        (
            {
                "rope_theta": None,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "rope_parameters and rope_scaling say different things",
        ),
    ],
)
def test_refusals(changes, message):
    assert message in _refusal(LLAMA | changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias = True"),
        ("mixtral", {"num_experts": 8}, "num_experts = 8 and num_local_experts = 4 disagree"),
    ],
)
def test_refusals_of_single_families(name, changes, message):
    assert message in _refusal(MODELS[name] | changes)


def test_a_missing_window_is_not_no_window():
    """transformers' Mistral takes one of 4096 tokens then."""
    plain = {key: value for key, value in MODELS["mistral"].items() if key != "sliding_window"}
    assert "sliding_window = null if the model has none" in _refusal(plain)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
        {
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "default"},
            "rope_scaling": {"type": "default"},
        },
    ],
)
def test_spellings_of_the_rope_base(rope):
    found = rope_fields(rope, family_of("llama"))
    assert found == {"type": "default", "theta": 1e6, "percent": 1.0}


@pytest.mark.parametrize("name", ["seed_oss", "qwen3_moe", "llama"])
def test_heads_without_a_size_share_the_hidden_one(name):
    """Also in a family that has a size where config.json has none."""
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert model_fields(MODELS[name] | sizes | {"head_dim": None})["head_dim"] == 24


def test_a_size_of_heads_that_is_missing_is_the_familys():
    hf = {key: value for key, value in MODELS["seed_oss"].items() if key != "head_dim"}
    assert model_fields(hf)["head_dim"] == 128


def test_experts_of_a_token_are_those_of_its_groups():
    """Of 8 experts in 4 groups, a token of two groups can take 4; a greedy one ignores groups."""
    hf = MODELS["deepseek_v2"] | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    model_fields(hf | {"num_experts_per_tok": 4})
    model_fields(hf | {"num_experts_per_tok": 5, "topk_method": "greedy"})
    refusal = _refusal(hf | {"num_experts_per_tok": 5})
    assert "the topk_group = 2 groups that a token may take them from have 4" in refusal


@pytest.mark.parametrize("name", [name for name in MODELS if "num_experts_per_tok" in MODELS[name]])
def test_one_expert_is_computed_where_its_weight_is_not_divided(name):
    hf = MODELS[name] | {"num_experts_per_tok": 1}
    never_divides = name.startswith("deepseek_v2")
    if hf["model_type"] == "qwen3_moe":
        assert model_fields(hf | {"norm_topk_prob": False})
        hf["norm_topk_prob"] = True
    if never_divides:
        assert model_fields(hf)
    else:
        assert "num_experts_per_tok = 1 is not supported" in _refusal(hf)


def test_groups_of_experts_only_where_they_limit():
    fields = unified(MODELS["deepseek_v2"])
    assert derived(fields)["moe_layers"] == [0, 1, 1, 1]
    assert "n_group" not in derived(fields)
    for changes in ({"topk_method": "greedy"}, {"n_group": 1}):
        assert derived(fields | changes)["topk_group"] is None


def test_what_weights_are_computed_with():
    """Equal for both spellings of a configuration, another one for other positions or norms."""
    hf = MODELS["qwen3"] | {"rope_theta": 1e6}
    new = {k: v for k, v in hf.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "torch_dtype": "float16",
    }
    assert computation(hf) == computation(new)
    for field, value in (("rope_theta", 1e4), ("rms_norm_eps", 0.5)):
        assert computation(hf | {field: value}) != computation(hf)
    seeing = SHAPES["qwen2_5_vl"]
    other_tower = {"vision_config": seeing["vision_config"] | {"num_heads": 8}}
    assert computation(seeing | other_tower) != computation(seeing)


def test_what_the_engine_must_read_otherwise():
    """transformers 5 saves neither the score function nor the method of DeepSeek-V3's router."""
    named = {"architectures": ["Any"]}
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name in ("deepseek_v3", "moonlight", "kimi_k2"):
        assert engine_overrides(MODELS[name] | named) == router
    assert engine_overrides(MODELS["kimi_k2"])["architectures"] == ["DeepseekV3ForCausalLM"]
    assert engine_overrides(MODELS["qwen3_moe"]) == {"architectures": ["Qwen3MoeForCausalLM"]}
    assert engine_overrides(MODELS["qwen3_moe"] | named) == {}
    seeing = SHAPES["qwen3_vl_moe"]
    assert engine_overrides(seeing) == {"text_config": {"norm_topk_prob": True}}


def test_the_engine_takes_no_groups_of_experts_where_the_method_ignores_them():
    named = {"architectures": ["Any"]}
    assert engine_overrides(MODELS["deepseek_v2"] | named) == {}
    greedy = engine_overrides(MODELS["deepseek_v2_lite"] | named)
    assert greedy == {"n_group": 1, "topk_group": 1}


def test_every_family_that_is_trained_has_an_architecture():
    for name in family_names():
        try:
            family = family_of(name)
        except ConfigError:
            continue
        assert family.architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "toy_part",
            'extends = ["base", "group_query"]',
            ["toy_part extends 'group_query'", "toy_part.toml:1", "did you mean 'grouped_query'"],
        ),
        (
            "toy_table",
            'extends = ["base", "grouped_query"]\n[megatrn]\nadd_qkv_bias = true',
            ["not the tables of a model family", "`megatrn`", "toy_table.toml", "base.toml"],
        ),
        (
            "toy_value",
            'extends = ["base", "grouped_query"]\n[fields.fixed]\nmlp_bias = false',
            ["Expected `array`, got `bool`", "toy_value.toml"],
        ),
        (
            "toy_reference",
            'extends = ["base", "grouped_query"]\n[fields]\noptional = ["attention_bias"]\n'
            '[megatron]\nadd_qkv_bias = "$attention_bia"',
            ["megatron.add_qkv_bias reads $attention_bia", "did you mean 'attention_bias'"],
        ),
        (
            "toy_negation",
            'extends = ["base", "grouped_query"]\n[megatron]\nqk_layernorm = "not $use_qk_norm"',
            ["megatron.qk_layernorm reads $use_qk_norm, which is no field of toy_negation"],
        ),
        (
            "toy_word",
            'extends = ["base", "grouped_query"]\n[megatron]\nqk_layernorm = "no $head_dim"',
            ["megatron.qk_layernorm reads 'no $head_dim'", "toy_word.toml", '"not $field"'],
        ),
    ],
)
def test_a_mistake_in_a_table_is_told(tmp_path, monkeypatch, name, text, words):
    folder = tmp_path / "families"
    shutil.copytree(family._FOLDER, folder)
    (folder / f"{name}.toml").write_text(text)
    monkeypatch.setattr(family, "_FOLDER", folder)
    with pytest.raises(ConfigError) as caught:
        family_of(name)
    told = str(caught.value)
    assert all(word in told for word in words), told


def test_derived_fields_are_those_that_tables_may_read():
    always = derived(unified(MODELS["deepseek_v2"]))
    assert set(always) == set(family.DERIVED)


@pytest.mark.parametrize("name", OTHERS)
def test_which_reward_models_transformers_loads(name):
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    of_family = family_of(name)
    known = modeling.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name)
    assert of_family.classifies == (known is not None)
    if known is not None:
        assert of_family.architecture_of_scalars == known
