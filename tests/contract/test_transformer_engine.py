"""Policies of every family are made of Transformer Engine's layers, and are the same weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.rehearsal.tiny_family import tiny_config
from tests.contract import te_extension
from tests.contract.pretended_gpus import in_a_process_of_its_own

pytestmark = pytest.mark.contract

SOURCES = Path(__file__).parents[2] / ".contract" / "sources"
NUM_LAYERS = 4
ONE_RANK: dict[str, Any] = {"num_ranks": 1}
EVERYTHING = {
    "num_ranks": 4,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
FP8 = {"num_ranks": 1, "fp8": "blockwise"}
ATTENTION_WITHOUT_KERNEL = {"AttentionWithoutKernel", "UnfusedDotProductAttention"}
"""Ours, and that of Transformer Engine in whose place it is."""
SETTINGS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "apply_rope_fusion",
    "fp8",
)


def one_preset_a_family() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in preset_names():
        found.setdefault(load_preset(name).hf["model_type"], name)
    return found


def weights_of_ranks(
    hf: dict[str, Any], layouts: list[dict[str, Any]], transformer_engine: bool
) -> tuple[list[Any], set[str]]:
    """For each layout, of the first rank of every pipeline stage: each shard of a parameter, with
    the Hugging Face tensors that it is a part of; which classes of Transformer Engine, and for what
    it has no kernel, are in the model; and what Megatron's settings say of the kernels."""
    te_extension.install(SOURCES)  # Megatron imports it in any case
    import grpo_megatron.trainer.megatron.platform  # isort: skip  # before Megatron
    import torch

    from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
    from grpo_megatron.trainer.megatron import layer_specs, policy
    from tests.contract.meta_rank import as_rank

    for module in (grpo_megatron.trainer.megatron.platform, layer_specs):
        module.HAS_TRANSFORMER_ENGINE = transformer_engine
    grpo_megatron.trainer.megatron.platform.HAS_CUDA = transformer_engine  # kernels are chosen
    if transformer_engine:  # its layers refuse to be made elsewhere; all tensors are on meta
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.set_device = lambda device: None
    found = []
    classes: set[str] = set()
    settings: list[dict[str, Any]] = []
    for layout in layouts:
        trainer = TrainerConfig(**layout)
        for stage in range(trainer.pipeline_parallel_size):
            rank = stage * trainer.num_ranks // trainer.pipeline_parallel_size
            with as_rank(trainer, rank):
                built = policy.build_policy(hf, trainer, OptimizerConfig())
                settings.append({name: getattr(built.config, name) for name in SETTINGS})
                tensors = policy.tensor_map(hf, built.config)
                num_experts = built.config.num_moe_experts or 0
                for shard in policy.local_shards(built.chunks, num_experts):
                    whole = tensors.parameter(shard.name, shard.full_shape)
                    part = (shard.dim, shard.size, shard.rank)
                    found.append((trainer.num_ranks, rank, whole.hf, whole.groups, part))
                for chunk in built.chunks:
                    classes |= {type(module).__name__ for module in chunk.modules()}
    told = {name for name in classes if name.startswith("TE") or name in ATTENTION_WITHOUT_KERNEL}
    return sorted(found, key=repr), told, settings


@pytest.mark.parametrize("preset", sorted(one_preset_a_family().values()))
def test_the_weights_are_those_of_torchs_layers(preset):
    hf = {"vocab_size": 96, **tiny_config(load_preset(preset).hf, num_layers=NUM_LAYERS)}
    layouts = [ONE_RANK, EVERYTHING]
    if not facts_from_hf(hf).num_experts:
        layouts[1] = {key: size for key, size in EVERYTHING.items() if "expert" not in key}
    fused, classes, settings = in_a_process_of_its_own(weights_of_ranks, hf, layouts, True)
    plain, without, plain_settings = in_a_process_of_its_own(weights_of_ranks, hf, layouts, False)
    assert not without and "TERowParallelLinear" in classes
    attends = "TESharedPrefixAttention" in classes
    assert attends != facts_from_hf(hf).is_mla  # docs/kernels.md
    assert ("AttentionWithoutKernel" in classes) == attends
    assert "UnfusedDotProductAttention" not in classes
    assert fused == plain
    assert not any(value for stage in plain_settings for value in stage.values())
    for stage in settings:
        assert stage["bias_activation_fusion"] and stage["gradient_accumulation_fusion"]
        assert not stage["moe_router_fusion"]
        assert stage["moe_permute_fusion"] == bool(facts_from_hf(hf).num_experts)


def test_latent_attention_is_transformer_engines_where_it_is_asked_for():
    preset = one_preset_a_family()["deepseek_v3"]
    hf = {"vocab_size": 96, **tiny_config(load_preset(preset).hf, num_layers=NUM_LAYERS)}
    layout = {**ONE_RANK, "attention": "transformer_engine"}
    _, classes, _ = in_a_process_of_its_own(weights_of_ranks, hf, [layout], True)
    assert "TESharedPrefixAttention" in classes


@pytest.mark.parametrize("preset", sorted(one_preset_a_family().values()))
def test_every_family_is_made_for_fp8(preset):
    hf = {"vocab_size": 96, **tiny_config(load_preset(preset).hf, num_layers=NUM_LAYERS)}
    _, classes, settings = in_a_process_of_its_own(weights_of_ranks, hf, [FP8], True)
    assert "TERowParallelLinear" in classes
    assert [stage["fp8"] for stage in settings] == ["e4m3"]


def attention_without_kernel() -> float:
    """How far a row's attention by way of Transformer Engine, which finds no kernel for it, is from
    that of torch's layers."""
    te_extension.install(SOURCES)
    import grpo_megatron.trainer.megatron.platform  # noqa: F401  # isort: skip  # before Megatron
    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    from grpo_megatron.batching.prefix_rows import RowTree
    from grpo_megatron.config.trainer import TrainerConfig
    from grpo_megatron.trainer.megatron import packed_attention
    from grpo_megatron.trainer.megatron.row_context import RowContext, attach
    from grpo_megatron.trainer.megatron.transformer_engine_attention import with_gathered_keys
    from tests.contract.meta_rank import as_rank

    torch.manual_seed(1)
    query = torch.randn(10, 2, 8)
    key, value = torch.randn(2, 10, 1, 8)
    row = packed_attention.whole_row(RowTree(np.array([3, 2, 1, 4]), np.array([-1, 0, 0, -1]), ()))
    bounds = torch.tensor([0, 3, 5, 6, 10], dtype=torch.int32)
    packed: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=4,
        max_seqlen_kv=4,
    )
    attach(packed, RowContext(row))
    hopper = SimpleNamespace(major=9, minor=0)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=0: hopper
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.is_cuda = True
    utils.get_attention_backend = lambda params: (False, None, False, None, True, [])
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=1,
        attention_dropout=0.0,
    )
    with as_rank(TrainerConfig(num_ranks=1), 0):
        attention = with_gathered_keys(TEDotProductAttention)(
            config, 1, AttnMaskType.padding_causal, "self"
        )
    found = attention(
        query, key, value, None, AttnMaskType.padding_causal, packed_seq_params=packed
    )
    expected = packed_attention.PackedAttention(config)(
        query, key, value, None, SimpleNamespace(row_context=RowContext(row))
    )
    return float((found - expected).abs().max())


def test_what_no_kernel_takes_is_computed_by_torch():
    assert in_a_process_of_its_own(attention_without_kernel) == 0.0
