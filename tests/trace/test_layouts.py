"""Families and layouts, a few layers each: every number of the plan is what the trainer does."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.trace

TP = {"num_ranks": 4, "tensor_parallel_size": 4}
WITHOUT_SP = {**TP, "sequence_parallel": False}
PP = {"num_ranks": 8, "tensor_parallel_size": 2, "pipeline_parallel_size": 4}
VPP = {
    "num_ranks": 8,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "virtual_pipeline_parallel_size": 2,
}
EP = {"num_ranks": 8, "expert_parallel_size": 4}
EP_TP = {
    "num_ranks": 16,
    "tensor_parallel_size": 2,
    "expert_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}
ETP = {**EP_TP, "expert_parallel_size": 4, "expert_tensor_parallel_size": 2}
EVERYTHING = {**EP_TP, "num_ranks": 32, "pipeline_parallel_size": 2}
FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
WHOLE_OPTIMIZER = {"distributed_optimizer": False}
FLOAT32 = {"precision": "float32"}
CP = {"num_ranks": 4, "context_parallel_size": 4}
CP_TP = {"num_ranks": 16, "context_parallel_size": 2, "tensor_parallel_size": 4}
CP_EVERYTHING = {**EVERYTHING, "num_ranks": 64, "context_parallel_size": 4}
UNEVEN = {"num_ranks": 4, "pipeline_parallel_size": 2, "last_stage_layers": 1}

CASES = [
    ("qwen3-8b", {}, {}),
    ("qwen3-8b", {**TP, **FULL}, {}),
    ("qwen3-8b", {**WITHOUT_SP, **SELECTIVE}, {}),
    ("qwen3-8b", {**VPP, **FULL}, {}),
    ("qwen3-8b", {**UNEVEN, "keep_logits": True}, {"vocab_size": 50000}),
    ("qwen3-8b", FLOAT32, {"vocab_size": 100_000}),
    ("qwen2.5-3b", PP, {}),  # tied embeddings
    ("qwen2.5-0.5b", {"num_ranks": 2, **WHOLE_OPTIMIZER}, {}),
    ("llama-3.3-70b", {**PP, **FULL}, {}),
    ("mixtral-8x22b", {**EP, **FULL}, {}),
    ("qwen3-30b-a3b", EP_TP, {}),
    ("qwen3-30b-a3b", {**ETP, **FULL}, {}),
    ("qwen3-30b-a3b", ETP, {}),
    ("glm-4.5", {**EVERYTHING, **FULL}, {"first_k_dense_replace": 1}),
    ("deepseek-v3", {**EVERYTHING, **FULL}, {"first_k_dense_replace": 1}),
    ("deepseek-v3", EVERYTHING, {"first_k_dense_replace": 1}),
    ("moonlight-16b-a3b", {**EP_TP, **FULL}, {}),  # queries without a low rank
    ("kimi-k2", {**EVERYTHING, **FULL}, {}),
    ("qwen3-8b", CP, {}),
    ("qwen3-8b", {**CP, **SELECTIVE}, {}),
    ("llama-3.3-70b", {**CP_TP, **FULL}, {}),
    ("qwen3-30b-a3b", {**CP_TP, "expert_parallel_size": 8, "expert_tensor_parallel_size": 1}, {}),
    ("deepseek-v3", CP_EVERYTHING, {"first_k_dense_replace": 1}),
    ("deepseek-v3", {**CP_EVERYTHING, **FULL}, {"first_k_dense_replace": 1}),
]


def names_of(case):
    preset, trainer, _ = case
    return "-".join([preset, *(f"{key.split('_')[0]}={value}" for key, value in trainer.items())])


@pytest.mark.parametrize("case", CASES, ids=names_of)
def test_the_plan_of_gpus_is_what_the_trainer_does(world1, tmp_path, case):
    preset, trainer, hf = case
    found = world1.run(
        "tests.trace.cases:compared", folder=str(tmp_path), preset=preset, trainer=trainer, hf=hf
    )
    assert not any(found["differences"].values()), found
    assert found["num_numbers"] >= 6


@pytest.mark.parametrize(
    ("preset", "trainer"),
    [
        ("qwen3-8b", TP),
        ("qwen3-8b", CP),
        ("qwen3-30b-a3b", EP_TP),
        ("moonlight-16b-a3b", {**EP, **FULL}),
        ("moonlight-16b-a3b", {**EP, "context_parallel_size": 2}),
    ],
)
def test_so_is_that_of_a_cpu(world1, tmp_path, preset, trainer):
    found = world1.run(
        "tests.trace.cases:compared",
        folder=str(tmp_path),
        preset=preset,
        trainer=trainer,
        on_gpu=False,
    )
    assert not any(found["differences"].values()), found


@pytest.mark.parametrize("trainer", [EP_TP, ETP], ids=["whole_experts", "split_experts"])
def test_rows_that_do_not_divide_by_experts(world1, tmp_path, trainer):
    found = world1.run(
        "tests.trace.cases:compared",
        folder=str(tmp_path),
        preset="qwen3-30b-a3b",
        trainer=trainer,
        tokens=1003,
    )
    assert not any(found["differences"].values()), found
