"""What a run of a model that sees is refused, with place and remedy, before anything starts."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.cli.trace_plan import trace
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.config.problems import InvalidConfigError
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.advice import advice_for
from grpo_megatron.plan.resolve import resolve, resolve_run
from tests.trainer.vision import (
    DEEP_PROCESSOR,
    DEEP_VISION,
    PROCESSOR,
    SPARSE_VISION,
    VISION,
)

COUNT = "demo/vision-count-cpu"
TEXT = "demo/gspo-moe-cpu"


def _refusal(recipe: str, *overrides: str) -> str:
    with pytest.raises(InvalidConfigError) as caught:
        resolve(recipe, overrides)
    return str(caught.value)


def test_the_recipe_is_valid_with_pipelines_tensor_ranks_and_several_engines():
    flags = ["trainer.num_ranks=4", "trainer.tensor_parallel_size=2"]
    flags += ["trainer.pipeline_parallel_size=2", "rollout.num_replicas=2"]
    assert resolve(COUNT, flags).config.domains[0].source == "shapes"


def test_a_critic_on_the_policys_layers_sees():
    config = resolve(COUNT, ["objective.preset=ppo", "critic.trunk=policy"]).config
    assert config.policy_has_value_head


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["lora.rank=4", "trainer.vision_tower=trained"],
            ["trainer.vision_tower", "adapters of the text's layers", "vision_tower=frozen"],
        ),
        (
            ["lora.rank=4", "lora.publish=adapter", 'lora.targets=["self_attn"]'],
            [
                "lora.publish",
                "'adapter' was not tried with engines that see",
                "lora.publish=merged",
            ],
        ),
        (
            ["correction.probability=0.5"],
            ["a retry is asked for without the images", "remove [correction]"],
        ),
        (["objective.preset=ppo", "critic.warmup_steps=0"], ["a critic has no vision tower"]),
        (["kind=sft", "cold_start=null"], ["kind", "by kind rl and", "set kind=rl"]),
        (
            ["kind=rejection_sample", "num_steps=0", "cold_start=null"],
            ["evaluated by kind eval; other kinds have no images", "set kind=eval"],
        ),
        (
            ["domains.0.environment.name=calculator", "domains.0.template=chat"],
            ["domains.0.environment", "episodes have no images"],
        ),
    ],
)
def test_what_is_not_computed_with_images(overrides, words):
    text = _refusal(COUNT, *overrides)
    for word in words:
        assert word in text


@pytest.mark.parametrize(("width", "is_refused"), [(32, False), (64, True), (128, True)])
def test_engines_do_not_read_square_stacks_from_files(tmp_path, width, is_refused):
    """Of experts of `width` in a model of 128, gate and up, or down, are then square."""
    text = SPARSE_VISION["text_config"] | {"moe_intermediate_size": width}
    hf = SPARSE_VISION | {"text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(DEEP_PROCESSOR))
    settings = ["model.preset=null", f"model.path={tmp_path}"]
    assert resolve(COUNT, settings).config.publish.method == "auto"
    if not is_refused:
        resolve(COUNT, [*settings, "publish.method=file"])
        return
    text = _refusal(COUNT, *settings, "publish.method=file")
    for word in ("publish.method", f"experts of {width} x 128", "publish.method=auto"):
        assert word in text


def test_stacks_in_fp8_are_refused_with_the_configuration(tmp_path):
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hf = SPARSE_VISION | {"quantization_config": fp8}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(DEEP_PROCESSOR))
    text = _refusal(COUNT, "model.preset=null", f"model.path={tmp_path}")
    assert "is not supported for qwen3_vl_moe" in text and "quantization_config = null" in text


def test_a_text_model_gets_no_pictures(tmp_path):
    shapes = ["domains.0.source=shapes", "domains.0.dataset=null", "domains.0.arguments={}"]
    text = _refusal(TEXT, *shapes)
    assert "domains.0.source" in text and "sees no images" in text
    text = _refusal(TEXT, f"domains.0.image_folder={tmp_path}")
    assert "domains.0.image_folder" in text and "model.preset=tiny-qwen2.5-vl" in text


def test_only_a_tower_that_is_there_is_trained():
    assert resolve(COUNT, ["trainer.vision_tower=trained"]).config.trainer
    text = _refusal(TEXT, "trainer.vision_tower=trained")
    for word in ("trainer.vision_tower", "qwen3_moe", "has no vision tower", "vision_tower=frozen"):
        assert word in text


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_run_goes_on_with_the_tower_that_its_checkpoints_have(tmp_path, tower):
    """Their optimizer states differ."""
    stored = tmp_path / "config.json"
    write_resolved(stored, resolve(COUNT, [f"trainer.vision_tower={tower}"]))
    same = resolve_run(stored, ["num_steps=7", f"trainer.vision_tower={tower}"]).config
    assert same.trainer.vision_tower == tower
    [other] = {"frozen", "trained"} - {tower}
    with pytest.raises(ConfigError, match=f"trainer.vision_tower is '{other}'") as caught:
        resolve_run(stored, [f"trainer.vision_tower={other}"])
    assert caught.value.where == str(stored)
    assert f"leave it at '{tower}'" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ({}, None, "cannot read the model's preprocessor_config.json"),
        ({}, {"image_std": None}, "image_std is not three numbers"),
        ({}, {"min_pixels": "784"}, "min_pixels = '784', expected a whole number"),
        (
            {},
            {"do_normalize": False},
            "do_normalize = False, expected True (preproc",
        ),
        ({"model_type": "qwen2_vl"}, {}, "model_type 'qwen2_vl' is not supported"),
        (
            {"model_type": "qwen3_vl"},
            {},
            "its text's fields in a table text_config, which is missing",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 8]}},
            {},
            "mrope_section = [4, 6, 8] does not share out heads of 32 features",
        ),
        ({"rope_scaling": None}, {}, "rope type 'default' needs mrope_section"),
        ({"vision_config": {"hidden_act": "gelu"}}, {}, "vision_config.hidden_act = 'gelu'"),
    ],
)
def test_models_that_are_not_computed(tmp_path, config, processor, words):
    (tmp_path / "config.json").write_text(json.dumps(VISION | config))
    if processor is not None:
        file = tmp_path / "preprocessor_config.json"
        file.write_text(json.dumps(PROCESSOR | processor))
    flags = ["model.preset=null", f"model.path={tmp_path}"]
    assert words in _refusal(COUNT, *flags)


INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}


@pytest.mark.parametrize(
    ("of_text", "of_tower", "words"),
    [
        (
            {"rope_scaling": INTERLEAVED | {"mrope_interleaved": False}},
            {},
            "rope_scaling.mrope_interleaved = False is not supported for qwen3_vl",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}},
            {},
            "rope type 'default' needs mrope_interleaved",
        ),
        (
            {},
            {"deepstack_visual_indexes": [1, 0]},
            "[1, 0] are not blocks of a tower of 3, in ascending order",
        ),
        ({}, {"deepstack_visual_indexes": [1, 3]}, "numbers from 0 to 2, each once"),
        (
            {"num_hidden_layers": 1},
            {},
            "features for 2 layers (vision_config.deepstack_visual_indexes), and the model has 1",
        ),
        ({}, {"hidden_act": "silu"}, "vision_config.hidden_act = 'silu'"),
        (
            {},
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "axial"}},
            "vision_config.rope_parameters.rope_theta = 5.0 is not supported",
        ),
    ],
)
def test_deep_models_that_are_not_computed(tmp_path, of_text, of_tower, words):
    config = {
        **DEEP_VISION,
        "text_config": DEEP_VISION["text_config"] | of_text,
        "vision_config": DEEP_VISION["vision_config"] | of_tower,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(DEEP_PROCESSOR))
    text = _refusal(COUNT, "model.preset=null", f"model.path={tmp_path}")
    assert words in " ".join(text.split())


BOX_IOU = 'function = "grpo_megatron.rewards.boxes:box_iou"'


def _box_reward(arguments: str) -> str:
    return f"domains.0.rewards=[{{{BOX_IOU}, arguments = {{{arguments}}}}}]"


def test_boxes_are_scaled_as_the_models_images_are():
    """By arguments of the reward, whose defaults are those of a released Qwen2.5-VL."""
    sizes = 'size_fields = ["width", "height"]'
    no_accuracy = "domains.0.accuracy=null"
    text = " ".join(_refusal(COUNT, _box_reward(sizes), no_accuracy).split())
    assert "domains.0.rewards.0.arguments" in text
    assert "boxes are scaled with min_pixels = 3136, max_pixels = 12845056" in text
    assert "set min_pixels = 784, max_pixels = 50176 in these arguments" in text
    fit = f"{sizes}, min_pixels = 784, max_pixels = 50176"
    resolve(COUNT, [_box_reward(fit), no_accuracy])
    resolve(COUNT, [_box_reward(""), no_accuracy])
    deep = "model.preset=tiny-qwen3-vl"
    text = " ".join(_refusal(COUNT, deep, _box_reward(sizes), no_accuracy).split())
    assert "set token_pixels = 32, min_pixels = 1024, max_pixels = 65536" in text
    resolve(TEXT, [_box_reward(sizes), no_accuracy])


def test_what_knows_no_images_says_so():
    with pytest.raises(ConfigError, match="a trace knows no images"):
        trace(COUNT, [], as_json=False)


def test_a_plan_says_what_it_does_not_know_of_images(tmp_path):
    """At the sizes of Qwen2.5-VL-3B, whose config.json is flat; not for a tiny model."""
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    (tmp_path / "config.json").write_text(json.dumps(VISION | sizes))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    large = resolve(COUNT, ["model.preset=null", f"model.path={tmp_path}"]).config
    found = {advice.rule: advice.message for advice in advice_for(large)}
    assert "plans take each prompt to be one image and nothing else" in found["vision_tower"]
    assert "vision_tower" not in {a.rule for a in advice_for(resolve(COUNT).config)}
