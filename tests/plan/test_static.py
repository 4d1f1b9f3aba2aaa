"""Closed forms of static bytes = the real Megatron modules and optimizer, as integers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.plan.rank_bytes import inference_bytes, static_bytes
from grpo_megatron.plan.weights import sizes_of, weights_of_chunk

SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "ranks": "num_ranks",
    "first": "first_stage_layers",
    "last": "last_stage_layers",
    "sharded": "distributed_optimizer",
    "dtype": "precision",
}
_MAX_MODULES = 3000  # weights of a rank: 30 s; what has more differs in the number of experts only
MIXTURES = [
    {"ranks": 1, "dtype": "float32"},
    {"ranks": 6, "sharded": False},
    {"ranks": 6, "tp": 2},
    {"ranks": 4, "tp": 2, "sharded": False, "dtype": "float32"},
    {"ranks": 8, "tp": 4, "etp": 1},
    {"ranks": 16, "tp": 2, "ep": 8, "etp": 1},
    {"ranks": 16, "tp": 2, "ep": 2, "etp": 2},
    {"ranks": 12, "pp": 3, "ep": 2},
    {"ranks": 8, "pp": 2, "first": 5},
    {"ranks": 8, "pp": 4, "tp": 2, "last": 2, "first": 3},
    {"ranks": 4, "pp": 2, "vpp": 2},
    {"ranks": 16, "pp": 4, "vpp": 2, "ep": 4, "dtype": "float32"},
    {"ranks": 8, "tp": 2, "pp": 2, "vpp": 3},
    {"ranks": 64, "ep": 32},
]


def layouts_of(name: str) -> list[dict]:
    """The recommended layouts, and those of the mixtures that the model can have."""
    preset = load_preset(name)
    found = [layout["trainer"] for layout in preset.layouts]
    for mixture in MIXTURES:
        trainer = {SHORT[key]: value for key, value in mixture.items()}
        rules = check_layout(Case(TrainerConfig(**trainer), facts_from_hf(preset.hf), cpu=False))
        found += [] if rules else [trainer]
    return [layout for layout in found if num_weights(preset.hf, layout) <= _MAX_MODULES]


def num_weights(hf: dict, layout: dict) -> int:
    sizes = sizes_of(hf, 96, TrainerConfig(**layout))
    return sum(len(weights_of_chunk(sizes, 0, chunk)) for chunk in range(sizes.num_chunks))


def ranks_to_look_at(trainer: TrainerConfig, limit: int) -> list[int]:
    """First and last ranks of up to `limit` stages, the outer ones first; 0: every rank."""
    if not limit:
        return list(range(trainer.num_ranks))
    per_stage, pp = (
        trainer.num_ranks // trainer.pipeline_parallel_size,
        (trainer.pipeline_parallel_size),
    )
    stages = sorted(range(pp), key=lambda p: min(p, pp - 1 - p))[:limit]
    return sorted({p * per_stage + i for p in stages for i in (0, per_stage - 1)})


def compare(world1, name: str, layout: dict, *, limit: int, **settings) -> None:
    hf = {"vocab_size": 96, **load_preset(name).hf}
    trainer = TrainerConfig(**layout)
    sizes = sizes_of(hf, hf["vocab_size"], trainer)
    sizes = replace(sizes, num_scalars=int(settings.get("value_head", False)))
    if "lora" in settings:
        sizes = sizes_of(hf, hf["vocab_size"], trainer, LoraConfig(**settings["lora"]))
    sizes = replace(sizes, has_value_head=settings.get("head_beside", False))
    for rank in ranks_to_look_at(trainer, limit):
        real = world1.run(
            "tests.plan.meta_cases:real_bytes", hf=hf, trainer=layout, rank=rank, **settings
        )
        stage, local = divmod(rank, trainer.num_ranks // trainer.pipeline_parallel_size)
        assert real.pop("shapes") == [
            [weight.numel for weight in weights_of_chunk(sizes, stage, chunk)]
            for chunk in range(sizes.num_chunks)
        ]
        planned = static_bytes(
            sizes,
            stage,
            local,
            overlaps=settings.get("overlaps", False),
            frozen_routers=settings.get("router_policy") == "freeze_weights",
        )
        if not settings.get("trains", True):
            planned = {"gradients": 0, "optimizer": 0, **inference_bytes(sizes, stage)}
        assert planned == real


pytestmark = pytest.mark.engine
QUICK = [
    ("deepseek-v3", 0),
    ("tiny-qwen3-moe", 0),
    ("tiny-qwen3-moe", 8),
    ("qwen2.5-0.5b", 2),
    ("qwen2.5-3b", -1),
    ("glm-4.5-air", 0),
    ("moonlight-16b-a3b", -2),
]


@pytest.mark.parametrize(("name", "which"), QUICK)
def test_static_bytes(world1, name, which):
    layouts = layouts_of(name)
    compare(world1, name, layouts[which % len(layouts)], limit=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"num_ranks": 6, "tensor_parallel_size": 2},
        {"num_ranks": 4, "tensor_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ],
    ids=["tensor", "experts_whole"],
)
def test_experts_have_their_own_buffers_without_expert_parallelism(world1, layout):
    compare(world1, "tiny-qwen3-moe", layout, limit=2)


def test_static_bytes_of_every_rank(world1):
    compare(
        world1,
        "tiny-qwen3-moe",
        {
            SHORT[key]: value
            for key, value in {"ranks": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 1}.items()
        },
        limit=0,
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    list(
        itertools.product(
            [{"router_policy": "freeze_weights"}, {"overlaps": True}],
            ["tiny-qwen3-moe", "qwen2.5-3b"],
        )
    ),
)
def test_other_buffers(world1, settings, name):
    compare(world1, name, layouts_of(name)[-2], limit=1, **settings)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny-qwen3-moe", {"num_ranks": 4, "pipeline_parallel_size": 2}),
        ("qwen2.5-3b", {"num_ranks": 2, "tensor_parallel_size": 2}),  # tied embeddings
        ("qwen2.5-3b", {"num_ranks": 4, "pipeline_parallel_size": 2}),
    ],
)
def test_critics_with_a_value_head(world1, name, layout):
    compare(world1, name, layout, limit=2, value_head=True)


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("tiny-qwen3-moe", {"num_ranks": 4, "pipeline_parallel_size": 2}, {}),
        ("qwen2.5-3b", {"num_ranks": 4, "tensor_parallel_size": 2}, {}),  # tied embeddings
        ("tiny-qwen3-moe", {"num_ranks": 4, "expert_parallel_size": 2}, {"lora": {"rank": 4}}),
        ("tiny-qwen2.5-vl", {"num_ranks": 2, "vision_tower": "trained"}, {}),
    ],
)
def test_policies_with_a_value_head(world1, name, layout, settings):
    compare(world1, name, layout, limit=2, head_beside=True, **settings)


TRAINED = {"vision_tower": "trained"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny-qwen2.5-vl", {"num_ranks": 4, "tensor_parallel_size": 2, **TRAINED}),
        ("tiny-qwen2.5-vl", {"num_ranks": 4, "pipeline_parallel_size": 2}),
        ("tiny-qwen3-vl", {"num_ranks": 4, "pipeline_parallel_size": 2, **TRAINED}),
        ("tiny-qwen3-vl-moe", {"num_ranks": 4, "expert_parallel_size": 4, **TRAINED}),
        pytest.param(
            "tiny-qwen2.5-vl",
            {
                "num_ranks": 4,
                "pipeline_parallel_size": 2,
                "virtual_pipeline_parallel_size": 2,
                "precision": "float32",
                **TRAINED,
            },
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "tiny-qwen2.5-vl",
            {"num_ranks": 2, "distributed_optimizer": False, **TRAINED},
            marks=pytest.mark.matrix,
        ),
        pytest.param("qwen2.5-vl-3b", {"num_ranks": 4, **TRAINED}, marks=pytest.mark.matrix),
        pytest.param(
            "qwen3-vl-8b",
            {"num_ranks": 8, "tensor_parallel_size": 2, **TRAINED},
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "qwen2.5-vl-3b",
            {"num_ranks": 8, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_vision_towers(world1, name, layout):
    compare(world1, name, layout, limit=2)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_a_vision_tower_has_weights_on_the_first_stage_alone(tower):
    hf = load_preset("qwen2.5-vl-3b").hf
    trainer = TrainerConfig(num_ranks=2, pipeline_parallel_size=2, vision_tower=tower)
    sizes = sizes_of(hf, hf["vocab_size"], trainer)
    first, second = (weights_of_chunk(sizes, stage, 0) for stage in (0, 1))
    of_tower = [weight for weight in first if weight.kind == "tower"]
    assert sum(weight.numel for weight in of_tower) == 668_684_288
    assert {weight.is_trained for weight in of_tower} == {tower == "trained"}
    assert not [weight for weight in second if weight.kind == "tower"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", preset_names())
def test_static_bytes_of_every_model_and_layout(world1, name):
    for layout in layouts_of(name):
        compare(world1, name, layout, limit=3)


@pytest.mark.parametrize(
    ("name", "layout", "lora"),
    [
        ("tiny-qwen3-moe", {"num_ranks": 6, "tensor_parallel_size": 2}, {"rank": 4}),
        (
            "tiny-qwen3-moe",
            {"num_ranks": 4, "expert_parallel_size": 2},
            {"rank": 3, "experts": "shared"},
        ),
        (
            "tiny-qwen3-moe",
            {"num_ranks": 4, "tensor_parallel_size": 2, "expert_parallel_size": 2},
            {"rank": 3, "dora": True},
        ),
        pytest.param(
            "qwen2.5-0.5b",
            {"num_ranks": 2},
            {"rank": 4, "targets": ["q_proj", "mlp"]},
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "moonlight-16b-a3b",
            {"num_ranks": 64, "expert_parallel_size": 32},
            {"rank": 4},
            marks=pytest.mark.matrix,
        ),
        ("tiny-qwen3-vl-moe", {"num_ranks": 4, "expert_parallel_size": 2}, {"rank": 4}),
    ],
    ids=["each", "shared", "dora", "some", "latent", "sees"],
)
def test_adapters_are_all_that_is_trained(world1, name, layout, lora):
    compare(world1, name, layout, limit=1, lora=lora)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (
            "tiny-qwen3-moe",
            {"num_ranks": 4, "pipeline_parallel_size": 2, "expert_parallel_size": 2},
        ),
        ("tiny-qwen3-moe", {"num_ranks": 2, "distributed_optimizer": False}),
        ("qwen2.5-0.5b", {"num_ranks": 2, "precision": "float32"}),  # tied embeddings
        ("deepseek-v3", {"num_ranks": 256, "pipeline_parallel_size": 16, "last_stage_layers": 1}),
    ],
)
def test_a_policy_that_is_not_trained_has_weights_alone(world1, name, layout):
    compare(world1, name, layout, limit=2, trains=False)
