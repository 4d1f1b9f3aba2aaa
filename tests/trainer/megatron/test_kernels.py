"""What is installed, and what the model is, decide the kernels; each says why."""

from __future__ import annotations

import itertools

import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import SetupError
from grpo_megatron.trainer.megatron.kernels import (
    TORCH_SDPA,
    Computation,
    Installed,
    attention_is_torch,
    choose,
    installed,
    settings_of,
)
from grpo_megatron.trainer.megatron.model_config import why_not_share_prefixes

NOTHING = Installed(cuda=False, transformer_engine=False, deep_ep=False, hybrid_ep=False)
GPU = Installed(cuda=True, transformer_engine=False, deep_ep=False, hybrid_ep=False)
ENGINE = Installed(cuda=True, transformer_engine=True, deep_ep=False, hybrid_ep=False)
EVERYTHING = Installed(cuda=True, transformer_engine=True, deep_ep=True, hybrid_ep=True)


def computation(
    *, num_experts: int = 8, latent: bool = False, factor: float = 1.0, **layout
) -> Computation:
    settings = {"num_ranks": 2, "expert_parallel_size": 2, "share_prefixes": False, **layout}
    trainer = TrainerConfig(**settings)
    return Computation(
        trainer, num_experts=num_experts, latent_attention=latent, rotary_factor=factor
    )


def chosen(there: Installed, wanted: Computation) -> dict[str, str]:
    return {kernel.part: kernel.chosen for kernel in choose(there, wanted)}


def test_a_cpu_fuses_nothing():
    settings = settings_of(choose(NOTHING, computation()))
    fused = [name for name, value in settings.items() if value is True]
    assert not fused
    assert settings["moe_token_dispatcher_type"] == "alltoall"


def test_a_gpu_with_everything_fuses_all_but_the_router():
    settings = settings_of(choose(EVERYTHING, computation()))
    separate = [name for name, value in settings.items() if value is False]
    assert separate == ["moe_router_fusion"]
    assert settings["moe_flex_dispatcher_backend"] == "hybridep"


def test_a_gpu_without_transformer_engine_fuses_what_torch_compiles():
    settings = settings_of(choose(GPU, computation()))
    fused = {name for name, value in settings.items() if value is True}
    assert fused == {"bias_activation_fusion", "bias_dropout_fusion"}


@pytest.mark.parametrize(
    ("wanted", "rope"),
    [
        (computation(), "fused"),
        (computation(factor=1.2), "separate"),
        (computation(latent=True), "separate"),
        (computation(share_prefixes=True), "separate"),
    ],
)
def test_the_fused_rotation_is_used_where_it_is_right(wanted, rope):
    assert chosen(ENGINE, wanted)["rope"] == rope


@pytest.mark.parametrize(
    ("there", "wanted", "attention"),
    [
        (ENGINE, computation(), "Transformer Engine"),
        (ENGINE, computation(attention="torch"), TORCH_SDPA),
        (ENGINE, computation(precision="float32"), TORCH_SDPA),
        (ENGINE, computation(latent=True), TORCH_SDPA),
        (ENGINE, computation(latent=True, attention="transformer_engine"), "Transformer Engine"),
        (GPU, computation(), TORCH_SDPA),
    ],
)
def test_attention_is_computed_by_what_was_seen_to_be_right(there, wanted, attention):
    kernels = choose(there, wanted)
    [found] = [kernel.chosen for kernel in kernels if kernel.part == "attention"]
    assert found == attention
    assert attention_is_torch(kernels) == (attention == TORCH_SDPA)


@pytest.mark.parametrize(
    ("there", "layout", "dispatcher"),
    [
        (ENGINE, {}, "alltoall"),
        (EVERYTHING, {}, "hybridep"),
        (Installed(True, True, deep_ep=True, hybrid_ep=False), {}, "deepep"),
        (EVERYTHING, {"moe_dispatcher": "deepep"}, "deepep"),
        (EVERYTHING, {"moe_dispatcher": "alltoall"}, "alltoall"),
        (EVERYTHING, {"precision": "float32"}, "alltoall"),
    ],
)
def test_the_dispatcher_is_the_fastest_that_can_be_used(there, layout, dispatcher):
    assert chosen(there, computation(**layout))["dispatcher"] == dispatcher


@pytest.mark.parametrize(
    ("there", "layout", "place"),
    [
        (ENGINE, {"moe_dispatcher": "deepep"}, "trainer.moe_dispatcher"),
        (NOTHING, {"moe_dispatcher": "hybridep"}, "trainer.moe_dispatcher"),
        (
            EVERYTHING,
            {"moe_dispatcher": "deepep", "precision": "float32"},
            "trainer.moe_dispatcher",
        ),
        (GPU, {"attention": "transformer_engine"}, "trainer.attention"),
        (
            ENGINE,
            {"attention": "transformer_engine", "precision": "float32"},
            "trainer.attention",
        ),
        (GPU, {"fp8": "blockwise"}, "trainer.fp8"),
        (NOTHING, {"fp8": "blockwise"}, "trainer.fp8"),
    ],
)
def test_what_is_asked_for_and_absent_is_refused(there, layout, place):
    with pytest.raises(SetupError) as error:
        choose(there, computation(**layout))
    assert error.value.where == place
    assert error.value.remedy


def test_dense_models_have_no_kernels_of_experts():
    parts = chosen(EVERYTHING, computation(num_experts=0))
    assert not parts.keys() & {"experts", "permutation", "router", "dispatcher"}


def test_every_choice_says_why():
    layouts = ({}, {"fp8": "blockwise"})
    for there, layout in itertools.product((NOTHING, GPU, ENGINE, EVERYTHING), layouts):
        if layout and not there.transformer_engine:
            continue
        for kernel in choose(there, computation(**layout)):
            assert kernel.why and kernel.why in str(kernel)


def test_this_machine_is_looked_at():
    import torch

    assert installed().cuda == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("preset", "router_policy", "is_exact"),
    [
        ("deepseek-v3", "none", False),
        ("deepseek-v3", "freeze_bias", True),
        ("tiny-qwen3-moe", "none", True),
    ],
)
def test_prefixes_are_not_shared_where_a_bias_follows_the_tokens(preset, router_policy, is_exact):
    hf = {"vocab_size": 96, **load_preset(preset).hf}
    problem = why_not_share_prefixes(hf, router_policy)
    assert is_exact == (problem == "")
    assert is_exact or "routing.router_policy is 'none'" in problem
