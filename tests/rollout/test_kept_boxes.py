"""What engine workers keep, learned from vLLM's own loaders, for every family.

After a load of the kept parts alone, every byte of a worker equals that after a load of the whole
checkpoint."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from grpo_megatron.checkpoints.merge import merge_checkpoints
from tests.e2e.family_models import (
    settings_of,
    wide_settings_of,
    write_checkpoint,
    write_random_model,
)
from tests.rollout.engine_models import (
    compare_sliced_load,
    compare_stacked_load,
    load_less_than_planned,
    record_in_another_precision,
)
from tests.trainer.vision import DEEP_VISION, SPARSE_VISION, VISION, write_vision_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORKERS = {  # size of the tensor-parallel group, rank in it, whether experts are spread over it
    "tp1": (1, 0, False),
    "tp2_rank1": (2, 1, False),
    "ep2_rank0": (2, 0, True),
    "tp4_rank2": (4, 2, False),
}
GATE = [("deepseek_v3_kernel", "ep2_rank0")]
FP8_GATE = [("deepseek_v3_kernel", "tp2_rank1")]
SPARSE = [
    "mixtral",
    "qwen3_moe_all_sparse",
    "qwen3_moe_mixed",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v3_kernel",
    "deepseek_v3_groups",
    "kimi_k2",
    "moonlight",
    "glm4_moe",
    "glm4_moe_air",
]
SEEING = {"qwen2_5_vl": VISION, "qwen3_vl": DEEP_VISION, "qwen3_vl_moe": SPARSE_VISION}
DENSE = ["qwen2", "qwen2_tied", "qwen3", "llama", "llama_odd", "mistral", "seed_oss"]


def cases() -> list:
    found = []
    for name in (*DENSE, *SPARSE):
        for worker, (size, _, _) in WORKERS.items():
            if worker.startswith("ep") and name in DENSE:
                continue
            if settings_of(name)["num_attention_heads"] % size != 0:
                continue  # vLLM refuses it
            marks = () if (name, worker) in GATE else (pytest.mark.families,)
            found.append(pytest.param(name, worker, marks=marks, id=f"{name}-{worker}"))
    for name in SEEING:
        workers = ["tp1", "tp2_rank1"]
        if name == "qwen3_vl_moe":
            workers.append("ep2_rank0")
        for worker in workers:
            case = pytest.param(name, worker, marks=pytest.mark.families, id=f"{name}-{worker}")
            found.append(case)
    return found


def fp8_cases() -> list:
    found = []
    for name in (*DENSE, *SPARSE):
        for worker in ("tp1", "tp2_rank1", "ep2_rank0"):
            if worker.startswith("ep") and name in DENSE:
                continue
            marks = () if (name, worker) in FP8_GATE else (pytest.mark.families,)
            found.append(pytest.param(name, worker, marks=marks, id=f"{name}-{worker}"))
    return found


@pytest.fixture(scope="module")
def vllm_process():
    """A process in which one worker after the other is made: vLLM has global state."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield pool


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    written = {}

    def of(name: str) -> str:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("checkpoints") / name
            if name in SEEING:
                return write_vision_model(written[name], hf=SEEING[name])
            write_checkpoint(written[name], name, config_of_transformers=False)
        return str(written[name])

    return of


@pytest.fixture(scope="module")
def wide_checkpoint_of(tmp_path_factory):
    """Checkpoints of which two workers have whole blocks of FP8 each."""
    written = {}

    def of(name: str) -> str:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("wide_checkpoints") / name
            hf = wide_settings_of(name)
            write_random_model(written[name], hf, config_of_transformers=False)
        return str(written[name])

    return of


@pytest.mark.parametrize(("name", "worker"), cases())
def test_the_kept_parts_load_as_the_whole_checkpoint_does(
    vllm_process, checkpoint_of, name, worker
):
    checkpoint = checkpoint_of(name)
    found = vllm_process.submit(compare_sliced_load, checkpoint, *WORKERS[worker]).result()
    assert not found["different"]
    assert not [name for name in found["unchanged"] if name.endswith("proj.weight")]
    assert not found["whole"], "everything that vLLM's loaders copy is a box"
    size = WORKERS[worker][0]
    assert found["kept_bytes"] <= found["all_bytes"]
    if size > 1:
        assert found["kept_bytes"] < found["all_bytes"]


@pytest.mark.families
def test_stacks_in_files_are_what_is_published_of_them(vllm_process, checkpoint_of, tmp_path):
    """As released: turned."""
    source = Path(checkpoint_of("qwen3_vl_moe"))
    merge_checkpoints({source: 1.0}, tmp_path / "turned")
    found = vllm_process.submit(compare_stacked_load, str(tmp_path / "turned")).result()
    assert found == []


@pytest.mark.parametrize(("name", "worker"), fp8_cases())
def test_so_do_numbers_and_scales_of_fp8(vllm_process, wide_checkpoint_of, name, worker):
    checkpoint = wide_checkpoint_of(name)
    found = vllm_process.submit(
        compare_sliced_load, checkpoint, *WORKERS[worker], "blockwise"
    ).result()
    assert not found["different"]
    unchanged = [name for name in found["unchanged"] if "proj" in name or "_scale_inv" in name]
    assert not unchanged
    assert not found["whole"], "everything that vLLM's loaders copy is a box"
    if WORKERS[worker][0] > 1:
        assert found["kept_bytes"] < found["all_bytes"]


def test_an_engine_in_fp8_takes_nothing_else(vllm_process, wide_checkpoint_of):
    checkpoint = wide_checkpoint_of("qwen3")
    told = vllm_process.submit(record_in_another_precision, checkpoint).result()
    assert "in float8_e4m3fn, and it is published in float32" in told


def test_a_worker_that_wants_more_than_it_said_is_refused(vllm_process, checkpoint_of):
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint = checkpoint_of("qwen3_moe_all_sparse")
    told = vllm_process.submit(load_less_than_planned, checkpoint, name).result()
    assert f"of {name!r}, which it did not want when the transfer was planned" in told
