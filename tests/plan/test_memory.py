"""The predicted peak of real training steps of models of about 100 M parameters, on gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.packing import plan_microbatches
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.passes import num_whole_passes
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import memory_problems, plan_of, samples_of_step
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.rank_bytes import (
    HOST_BYTES_PER_PARAMETER,
    inference_bytes,
    static_bytes,
)
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.step_memory import step_bytes
from grpo_megatron.plan.weights import sizes_of, weights_of_chunk
from tests.trainer import worker_group
from tests.trainer.models import write_samples
from tests.trainer.vision import DEEP_VISION, PROCESSORS, VISION, write_vision_samples

VOCAB = 8192
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
PLANNED = resolve("moe/qwen3-30b-a3b").config
SEEING = {
    **VISION,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {
        **VISION["vision_config"],
        "depth": 12,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_heads": 8,
        "out_hidden_size": 512,
        "fullatt_block_indexes": [5, 11],
    },
}
"""Half of its weights are the tower's."""
SEEING_DEEP = {
    **DEEP_VISION,
    "text_config": {
        **DEEP_VISION["text_config"],
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [12, 10, 10],
        },
    },
    "vision_config": {
        **DEEP_VISION["vision_config"],
        "depth": 12,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_heads": 8,
        "out_hidden_size": 512,
        "num_position_embeddings": 1024,
        "deepstack_visual_indexes": [3, 6, 9],
    },
}
"""As large, with features of three blocks for three layers."""
PICTURES = [[(560, 560)], [(588, 560)]]
"""Of 400 tokens or more each."""
EP2 = {"num_ranks": 2, "expert_parallel_size": 2, "precision": "float32"}
DP2 = {"num_ranks": 2, "precision": "float32"}
TP2 = {"num_ranks": 2, "tensor_parallel_size": 2, "precision": "float32"}
PP2 = {"num_ranks": 2, "pipeline_parallel_size": 2, "precision": "float32"}
KEPT = {**TP2, "keep_logits": True}
ALONE = {"precision": "float32", "recompute": "full"}
BF16 = {"precision": "bfloat16", "recompute": "selective"}


def recipe(trainer: dict) -> dict:
    rewards = [{"function": "a:b", "name": name} for name in ("first", "second")]
    return {
        "name": "case",
        "model": {"preset": "tiny-qwen3-moe"},
        "trainer": trainer,
        "objective": {"preset": "grpo", "monitor_share": 0},
        "domains": [{"name": "d", "source": "file", "path": "x", "rewards": rewards}],
    }


def patches_of(table: SampleTable, rows, patches_of_token: int) -> int:
    """Of the images of a row, each once."""
    images = {image for row in rows.tolist() for image in table.images(row)}
    return sum(image.num_tokens for image in images) * patches_of_token


def predicted(
    hf: dict,
    trainer: TrainerConfig,
    samples: str,
    *,
    trains: bool = True,
    returns_blocks: bool = False,
) -> list[int]:
    """Peak of each rank, for the fullest micro-batch that it really has. returns_blocks: what
    libraries copy then takes the place of freed activations instead of coming on top."""
    sizes, table = sizes_of(hf, VOCAB, trainer), SampleTable(Path(samples))
    lengths = table.prompt_lengths + table.completion_lengths
    packing = plan_microbatches(
        SamplePaths.without_sharing(lengths),
        num_ranks=trainer.num_ranks // trainer.attention_ranks,
        max_tokens=trainer.max_tokens_per_microbatch,
    ).samples
    per_stage, found = trainer.num_ranks // trainer.pipeline_parallel_size, []
    for rank in range(trainer.num_ranks):
        stage, mine = rank // per_stage, packing[rank % per_stage // trainer.tensor_parallel_size]
        tokens = max(int(lengths[rows].sum()) for rows in mine)
        patches = 0
        if "vision_config" in hf:
            patches = max(patches_of(table, rows, 4) for rows in mine)
        static = inference_bytes(sizes, stage)
        if trains:
            static = static_bytes(sizes, stage, 0)
        moving = step_bytes(
            sizes,
            stage,
            tokens=tokens,
            on_gpu=False,
            replayed=False,
            num_microbatches=len(packing[0]),
            trains=trains,
            patches=patches,
        )
        of_step = sum(moving.values())
        if returns_blocks:
            of_step = max(of_step - moving["libraries"], moving["libraries"])
        found.append(sum(static.values()) + of_step)
    return found


@pytest.mark.parametrize("hf", [DENSE, MOE])
def test_the_models_have_about_100_m_parameters(hf):
    numel = sum(w.numel for w in weights_of_chunk(sizes_of(hf, VOCAB, TrainerConfig()), 0, 0))
    assert 90e6 < numel < 110e6


def test_kept_logits_are_those_of_the_last_stage():
    tokens = 1000
    found = {}
    for keep_logits in (False, True):
        trainer = TrainerConfig(**PP2, keep_logits=keep_logits)
        sizes = sizes_of(DENSE, VOCAB, trainer)
        for stage in (0, 1):
            moving = step_bytes(
                sizes,
                stage,
                tokens=tokens,
                on_gpu=True,
                replayed=False,
                num_microbatches=4,
            )
            found[keep_logits, stage] = moving["logits"]
    assert found[True, 0] == found[False, 0] == 0
    assert found[True, 1] - found[False, 1] == 4 * tokens * VOCAB


@pytest.mark.parametrize("kind", ["eval", "rejection_sample"])
def test_a_run_that_trains_nothing_is_planned_with_its_weights(kind):
    flags = [f"kind={kind}", "num_steps=0"]
    trained = plan_of(resolve("moe/deepseek-v3").config).worst
    without = plan_of(resolve("moe/deepseek-v3", [*flags, "cold_start=null"]).config)
    worst = without.worst
    assert worst.parts["gradients"] == worst.parts["optimizer"] == worst.parts["adam"] == 0
    assert worst.parts["activations"] == 0
    assert worst.parts["weights"] == pytest.approx(trained.parts["weights"], rel=0.01)
    assert worst.total < trained.total / 3
    assert without.numbers["trained_parameters"] == 0


PREFERENCES = "stages/tulu3-8b-preferences"
SMALL_ENGINE = ['rollout.engine_arguments=["--gpu-memory-utilization=0.1"]']


@pytest.mark.parametrize("kind", ["preferences", "reward_model"])
def test_a_run_without_engines_has_none_in_its_plan(kind):
    """Nor is it refused for what an engine would need."""
    config = resolve(PREFERENCES, SMALL_ENGINE).config.model_copy(update={"kind": kind})
    found = plan_of(config)
    assert (found.engine, found.shares, found.publish) == ({}, None, None)
    assert "publish_bytes" not in found.numbers
    assert memory_problems(config, found) == []


def test_a_supervised_run_has_engines_that_evaluate_it():
    config = resolve("stages/tulu3-8b-sft", SMALL_ENGINE).config
    [problem] = memory_problems(config, plan_of(config))
    assert problem.rule == "engine_memory"


def test_a_trainer_without_engines_has_its_gpus_alone():
    config = resolve(PREFERENCES).config
    placement = config.placement.model_copy(update={"mode": "colocated"})
    beside_nothing = config.model_copy(update={"placement": placement})
    assert plan_of(beside_nothing).usable_bytes == plan_of(config).usable_bytes


def test_optimizer_state_on_the_host():
    """GPUs have none of it, hosts all of it and gradients; where there is no GPU it stays."""
    on_gpus = plan_of(resolve("moe/qwen3-30b-a3b").config)
    offloaded = resolve("moe/qwen3-30b-a3b", ["trainer.offload_optimizer=true"]).config
    on_hosts = plan_of(offloaded)
    for before, after in zip(on_gpus.stages, on_hosts.stages, strict=True):
        assert before.parts["optimizer"] > 0
        assert after.parts == {**before.parts, "optimizer": 0}
    of_a_rank = on_gpus.worst.parts["optimizer"] // 12 * HOST_BYTES_PER_PARAMETER
    assert on_hosts.numbers["optimizer_on_a_host_bytes"] == 8 * of_a_rank
    assert "optimizer_on_a_host_bytes" not in on_gpus.numbers
    on_a_cpu = ["trainer.offload_optimizer=true", "trainer.precision=bfloat16"]
    beside = plan_of(resolve("demo/gspo-moe-cpu", on_a_cpu).config)
    assert beside.worst.parts["optimizer"] > 0


def test_a_layout_that_fits_with_its_optimizer_on_the_host_is_told():
    config = resolve("moe/qwen3-30b-a3b").config
    found = plan_of(config)
    parts = found.worst.parts
    between = found.worst.total - parts["optimizer"] // 2  # with half of it there is no room
    [problem] = memory_problems(config, replace(found, usable_bytes=between))
    told = f"set trainer.offload_optimizer: {parts['optimizer'] / 2**30:.1f} GiB go to the host"
    assert told in problem.remedy
    [problem] = memory_problems(config, replace(found, usable_bytes=parts["weights"]))
    assert "offload_optimizer" not in problem.remedy


@pytest.mark.engine
@pytest.mark.parametrize(
    ("hf", "layout", "max_tokens"),
    [
        pytest.param(MOE, EP2, 150, id="experts", marks=pytest.mark.matrix),
        pytest.param(MOE, DP2, 150, id="replicated", marks=pytest.mark.matrix),
        pytest.param(DENSE, TP2, 300, id="tensor", marks=pytest.mark.matrix),
        pytest.param(DENSE, KEPT, 300, id="logits", marks=pytest.mark.matrix),
        pytest.param(DENSE, PP2, 300, id="pipeline", marks=pytest.mark.matrix),
        pytest.param(DENSE, ALONE, 300, id="recomputed", marks=pytest.mark.matrix),
        pytest.param(DENSE, BF16, 40, id="bfloat16", marks=pytest.mark.matrix),
    ],
)
def test_predicted_peak(tmp_path, hf, layout, max_tokens):
    ratios = ratios_to_measured(tmp_path, hf, layout, max_tokens, trains=True)
    assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios


@pytest.mark.engine
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("hf", "layout", "max_tokens"),
    [
        pytest.param(MOE, EP2, 150, id="experts"),
        pytest.param(DENSE, TP2, 300, id="tensor"),
        pytest.param(DENSE, PP2, 300, id="pipeline"),
        pytest.param(DENSE, ALONE, 300, id="recomputed"),
        pytest.param(DENSE, BF16, 40, id="bfloat16"),
    ],
)
def test_predicted_peak_of_a_policy_that_is_not_trained(tmp_path, hf, layout, max_tokens):
    """In a pass for log-probs. Its layers are planned as if they were trained."""
    ratios = ratios_to_measured(tmp_path, hf, layout, max_tokens, trains=False)
    assert all(0.9 < ratio < 1.25 for ratio in ratios), ratios


@pytest.mark.engine
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"precision": "float32", "vision_tower": "trained"}, id="trained"),
        pytest.param({**ALONE, "vision_tower": "trained"}, id="recomputed"),
        pytest.param({**BF16, "vision_tower": "trained"}, id="bfloat16"),
        pytest.param({**PP2, "vision_tower": "trained"}, id="pipeline"),
        pytest.param({"precision": "float32"}, id="frozen"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_predicted_peak_with_images(tmp_path, layout, family):
    layout = {
        **layout,
        "max_tokens_per_microbatch": 1024,
        "share_prefixes": False,
        "logprob_chunk_tokens": 16,  # answers are short here
    }
    model = tmp_path / "model"
    model.mkdir()
    config = {"qwen2_5_vl": SEEING, "qwen3_vl": SEEING_DEEP}[family]
    (model / "config.json").write_text(json.dumps(config))
    processor = PROCESSORS[family] | {"max_pixels": 28 * 28 * 1024}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
    samples = write_vision_samples(
        tmp_path / "step_000001", str(model), num_samples=2, sizes_of_prompts=PICTURES
    )
    hf = read_config(model)
    ratios = ratios_on(hf, layout, samples, trains=True, returns_blocks=True)
    assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios


def ratios_to_measured(tmp_path, hf, layout, max_tokens, *, trains: bool) -> list[float]:
    """The predicted peak of every rank as a share of what was measured."""
    layout = {**layout, "max_tokens_per_microbatch": 1024, "share_prefixes": False}
    samples = write_samples(
        tmp_path / "step_000001",
        num_groups=2,
        num_samples=2,
        vocab_size=VOCAB,
        max_tokens=max_tokens,
    )
    return ratios_on(hf, layout, samples, trains=trains)


def ratios_on(
    hf: dict, layout: dict, samples: str, *, trains: bool, returns_blocks: bool = False
) -> list[float]:
    trainer = TrainerConfig(**layout)
    group = worker_group.WorkerGroup(
        trainer.num_ranks, isolated=True
    )  # nobody's memory but these imports
    try:
        measured = group.run(
            "tests.plan.memory_cases:peak_bytes",
            hf=hf,
            recipe=recipe(layout),
            samples=samples,
            trains=trains,
            returns_blocks=returns_blocks,
        )
    finally:
        group.close()
    peaks = predicted(hf, trainer, samples, trains=trains, returns_blocks=returns_blocks)
    ratios = [peak / real for peak, real in zip(peaks, measured, strict=True)]
    print({"predicted": [p >> 20 for p in peaks], "measured": [m >> 20 for m in measured]})
    return ratios


@pytest.mark.parametrize(
    ("recipe", "answers"),
    [
        ("dense/qwen2.5-7b", 8),
        ("stages/tulu3-8b-sft", 1),  # what a row has, not a group
        ("stages/tulu3-8b-preferences", 2),
        ("stages/tiny-process-reward-model", 1),
    ],
)
def test_a_step_has_the_answers_of_its_kind(recipe, answers):
    config = resolve(recipe, ["batch.num_prompts=64", "batch.num_samples_per_prompt=8"]).config
    assert samples_of_step(config) == 64 * answers


def test_kto_trains_one_answer_of_a_row_and_records_another():
    """The answer to another prompt, for the baseline: it is passed through, but not trained."""
    pairs = resolve("stages/tiny-preferences").config
    labelled = resolve("stages/tiny-preferences", ["preferences.loss=kto"]).config
    assert samples_of_step(labelled) == labelled.batch.num_prompts == samples_of_step(pairs) // 2
    of_pairs, of_labelled = plan_of(pairs).numbers, plan_of(labelled).numbers
    assert 2 * of_labelled["tokens_per_step"] == of_pairs["tokens_per_step"]
    assert of_labelled["sample_store_bytes"] == of_pairs["sample_store_bytes"]
    assert num_whole_passes(labelled, has_routers=False) == 1
    assert num_whole_passes(pairs, has_routers=False) == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stage_that_is_left_out_is_never_the_fullest(tmp_path_factory, data):
    """Layers with experts and dense ones in any order, and stages of any size."""
    stages = data.draw(st.integers(1, 6), "stages")
    chunks = data.draw(st.sampled_from([1, 2]), "chunks")
    layers = stages * chunks * data.draw(st.integers(1, 3), "layers of a chunk")
    dense = data.draw(st.sets(st.integers(0, layers - 1)), "dense layers")
    path = tmp_path_factory.mktemp("model")
    written = {**MOE, "num_hidden_layers": layers, "mlp_only_layers": sorted(dense)}
    (path / "config.json").write_text(json.dumps(written))
    trainer = PLANNED.trainer.model_copy(
        update={
            "num_ranks": stages,
            "tensor_parallel_size": 1,
            "expert_parallel_size": 1,
            "pipeline_parallel_size": stages,
            "virtual_pipeline_parallel_size": chunks if chunks > 1 and stages > 1 else None,
            "max_tokens_per_microbatch": data.draw(st.sampled_from([2048, 65536]), "tokens"),
        }
    )
    config = PLANNED.model_copy(
        update={"trainer": trainer, "model": ModelConfig(path=path, preset=None)}
    )
    whole = plan_of(config)
    fewer = plan_of(config, worst_only=True)
    assert fewer.worst == whole.worst
    assert memory_problems(config, fewer) == memory_problems(config, whole)


def test_a_stage_with_a_dense_layer_more_is_not_taken_for_the_others():
    """Of stages with one layer, then four each, the second has two dense layers and the third
    none."""
    layout = [
        "trainer.pipeline_parallel_size=16",
        "trainer.first_stage_layers=1",
        "trainer.last_stage_layers=null",
        "trainer.expert_parallel_size=16",
        "trainer.num_ranks=512",
        "placement.trainer_nodes=64",
    ]
    config = resolve("moe/deepseek-v3", layout).config
    fewer = plan_of(config, worst_only=True)
    assert fewer.worst == plan_of(config).worst
    assert [rank.stage for rank in fewer.stages] == [0, 1, 2, 15]
