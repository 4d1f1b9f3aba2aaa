"""Which layers [lora] names, and what it is refused with."""

from __future__ import annotations

import pytest

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.lora import linear_layers
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.plan.resolve import resolve

DEMO = "demo/gspo-moe-cpu"


def test_linear_layers_of_a_mixture():
    facts = facts_from_hf(load_preset("tiny-qwen3-moe").hf)
    assert linear_layers(facts) == [
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.experts.gate_proj",
        "mlp.experts.up_proj",
        "mlp.experts.down_proj",
    ]


@pytest.mark.parametrize("name", preset_names())
def test_no_router_and_no_norm_is_a_linear_layer(name):
    layers = linear_layers(facts_from_hf(load_preset(name).hf))
    assert len(layers) == len(set(layers)) >= 7
    assert not any("norm" in layer or layer.endswith(".gate") for layer in layers)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (['lora.targets=["qproj"]'], ["qproj", "q_proj"]),
        (['lora.targets=["mlp.gate_proj"]'], ["names no linear layer"]),
        (["lora.experts=shared", 'lora.targets=["q_proj"]'], ["names no routed experts"]),
    ],
)
def test_refusals(overrides, words):
    with pytest.raises(ConfigError) as caught:
        resolve(DEMO, ["lora.rank=4", *overrides])
    for word in words:
        assert word in str(caught.value)


def test_the_plan_says_what_adapters_save():
    config = resolve("moe/qwen3-30b-a3b-lora").config
    plan = plan_of(config)
    assert plan.numbers["trained_parameters"] < 0.001 * plan.numbers["parameters"]
    without = plan_of(config.model_copy(update={"lora": None}), worst_only=True)
    assert plan.numbers["fullest_rank_without_adapters_bytes"] == without.worst.total
    assert plan.worst.total < without.worst.total / 4


def test_a_cold_start_needs_what_weights_do():
    config = resolve("demo/lora-moe-cpu").config
    assert plan_of(config).stages == plan_of(config.model_copy(update={"lora": None})).stages


def test_adapters_for_everything():
    assert resolve(DEMO, ["lora.rank=4"]).config.lora is not None
