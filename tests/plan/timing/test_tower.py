"""What plans say a vision tower computes, held against what transformers' own module does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.timing.tower import Images, tower_amounts
from grpo_megatron.plan.timing.work import MicroBatchSize, stages_work
from grpo_megatron.plan.weights import Sizes, sizes_of
from tests.tiers import rest_in_matrix

RATIO = 2.5


def sizes(name: str = "qwen3-vl-30b-a3b", **trainer) -> Sizes:
    hf = load_preset(name).hf
    return sizes_of(hf, hf.get("vocab_size", 128), TrainerConfig(**trainer))


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    rest_in_matrix(
        ("qwen2.5-vl-3b", "qwen3-vl-8b", "tiny-qwen3-vl-moe"),
        ("qwen2.5-vl-3b", "tiny-qwen3-vl-moe"),
    ),
)
def test_operations_are_those_of_transformers(name):
    """Two images of 16 x 24 patches, which whole windows cover."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

    # isort: split
    from grpo_megatron.trainer.megatron.vision_tower import build_tower

    hf = dict(load_preset(name).hf)
    hf["vision_config"] = {**hf["vision_config"], "depth": 3}
    if hf["model_type"] == "qwen2_5_vl":
        hf["vision_config"]["fullatt_block_indexes"] = [1]
    else:
        hf["vision_config"]["deepstack_visual_indexes"] = [0, 2]
    s = sizes_of(hf, 128, TrainerConfig())
    tower = build_tower(hf, torch.float32)
    grid = torch.tensor([[1, 16, 24], [1, 16, 24]])
    patches = torch.randn(2 * 16 * 24, s.symbols["patch_values"])
    with (
        sdpa_kernel(SDPBackend.MATH),  # of which the operations are counted
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
    ):
        tower(patches, grid_thw=grid)
    planned = tower_amounts(s, Images(number=2, tokens=16 * 24 / 4))
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert planned.attention_flops == attention
    assert planned.matrix_flops == counter.get_total_flops() - attention


def batch_of(images: Images | None) -> MicroBatchSize:
    return MicroBatchSize(tokens=4096.0, squares=4e6, policy_tokens=4096.0, images=images)


def added(s: Sizes, images: Images) -> list[tuple[float, float]]:
    """Operations of matrices that images add to the forward and the backward of each stage."""
    found = []
    for with_images, without in zip(
        stages_work(s, batch_of(images), RATIO), stages_work(s, batch_of(None), RATIO), strict=True
    ):
        assert with_images.forward.matrix_flops == without.forward.matrix_flops
        forward = with_images.forward.tower_flops - without.forward.tower_flops
        backward = with_images.backward.tower_flops - without.backward.tower_flops
        found.append((forward, backward))
    return found


@pytest.mark.parametrize(
    ("settings", "of_backward"),
    [
        ({}, 0),
        ({"vision_tower": "trained"}, 2),
        ({"vision_tower": "trained", "recompute": "full"}, 3),
        ({"recompute": "full"}, 0),
    ],
)
def test_the_first_stage_computes_it_and_its_gradients_where_it_is_trained(settings, of_backward):
    s = sizes(num_ranks=2, pipeline_parallel_size=2, **settings)
    images = Images(number=3, tokens=500)
    once = tower_amounts(s, images).matrix_flops
    first, second = added(s, images)
    assert first == pytest.approx((once, of_backward * once))
    assert second == (0, 0)


def test_tensor_ranks_compute_all_of_it():
    images = Images(number=1, tokens=100)
    alone = added(sizes(), images)
    shared = added(sizes(num_ranks=2, tensor_parallel_size=2), images)
    assert shared[0] == pytest.approx(alone[0])


def test_a_patch_meets_its_image_only():
    """Twice as many images are twice the work, an image twice as large is more."""
    s = sizes()
    one = tower_amounts(s, Images(1, 400))
    two = tower_amounts(s, Images(2, 400))
    large = tower_amounts(s, Images(1, 800))
    assert two.attention_flops == 2 * one.attention_flops
    assert large.attention_flops == 4 * one.attention_flops
    assert large.matrix_flops == two.matrix_flops


def test_windows_bound_what_a_patch_meets():
    """Four of 32 blocks of Qwen2.5-VL see all of an image."""
    s = sizes("qwen2.5-vl-3b")
    found = tower_amounts(s, Images(1, 1000))
    everywhere = replace(s, symbols={**s.symbols, "whole_image_blocks": 32})
    whole = tower_amounts(everywhere, Images(1, 1000))
    assert found.attention_flops / whole.attention_flops == pytest.approx(
        4 / 32 + 28 / 32 * 64 / 4000
    )
