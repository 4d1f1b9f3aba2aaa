"""Everything shipped loads, obeys all rules, and is described by the schema."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.config import schema
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.plan.resolve import resolve


@pytest.mark.parametrize("name", assets.names(assets.root() / "recipes"))
def test_recipe(name):
    config = resolve(name).config
    trainer = config.trainer
    assert trainer.attention_ranks * trainer.dp == trainer.num_ranks
    assert trainer.num_ranks % trainer.expert_ranks == 0
    batch = config.batch
    num_samples = batch.num_prompts * batch.num_samples_per_prompt // batch.updates_per_rollout
    assert num_samples >= trainer.dp  # else ranks idle in every optimizer step


@pytest.mark.parametrize("name", preset_names())
def test_model_preset(name):
    preset = load_preset(name)
    assert facts_from_hf(preset.hf).num_layers == preset.hf["num_hidden_layers"]


def test_unknown_preset():
    with pytest.raises(ConfigError, match="tiny-qwen3-moe"):
        load_preset("tiny-qwen3-mo")


def test_every_setting_says_what_it_means():
    paths = [tuple(0 if part == "*" else part for part in path) for path in schema.all_fields()]
    assert all(schema.type_of(path) is not None for path in paths)
    settings = [path for path in paths if not schema.keys_of(path)]
    lists_of_tables = [("domains",), ("distillation", "teachers"), ("domains", 0, "rewards")]
    silent = [path for path in settings if not schema.meaning_of(path)]
    assert [path for path in silent if path not in lists_of_tables] == []


def test_a_description_is_the_docstring_under_its_field():
    document = schema.json_schema()
    assert document["properties"]["seed"]["description"].startswith("Seed of weights")
    for path, field in schema.all_fields().items():
        assert "\n" not in (field.description or ""), path


def test_json_schema_refuses_unknown_keys():
    document = schema.json_schema()
    assert document["additionalProperties"] is False
    assert {"extends", "trainer", "domains"} <= set(document["properties"])
