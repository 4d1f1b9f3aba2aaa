"""What [lora] says, without a model."""

from __future__ import annotations

import pytest

from grpo_megatron.config.lora import LoraConfig, is_target


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"rank": 8}, 2.0),
        ({"rank": 8, "alpha": 4}, 0.5),
        ({"rank": 16, "alpha": 8, "rank_stabilised": True}, 2.0),
    ],
)
def test_scale(settings, scale):
    assert LoraConfig(**settings).scale == scale


@pytest.mark.parametrize(
    ("module", "target", "wanted"),
    [
        ("self_attn.q_proj", "q_proj", True),
        ("self_attn.q_proj", "all-linear", True),
        ("self_attn.q_proj", "self_attn", True),
        ("self_attn.q_proj", "q", False),
        ("mlp.experts.17.down_proj", "experts", True),
        ("mlp.experts.17.down_proj", "experts.down_proj", True),
        ("mlp.experts.17.down_proj", "mlp.down_proj", False),
        ("mlp.shared_experts.down_proj", "experts", False),
    ],
)
def test_targets(module, target, wanted):
    assert is_target(module, (target,)) == wanted


def test_a_checkpoint_from_before_dora_has_none():
    saved = LoraConfig(rank=4).identity()
    del saved["dora"]
    assert LoraConfig.model_validate(saved).identity() == LoraConfig(rank=4).identity()


def test_how_engines_get_adapters_is_no_part_of_a_checkpoint():
    merged = LoraConfig(rank=4, publish="merged")
    assert merged.identity() == LoraConfig(rank=4, publish="adapter").identity()
