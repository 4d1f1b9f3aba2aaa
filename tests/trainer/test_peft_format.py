"""Numbers of adapters in PEFT's format, in one process."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.adapter_files import CONFIG, WEIGHTS
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.lora.peft_format import import_adapters
from grpo_megatron.weights.gather import Shard

A = "model.layers.0.self_attn.q_proj.lora_A.weight"
B = "model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def policy():
    """One adapter of rank 2, of a layer with 5 inputs and 3 outputs."""
    shards = [Shard(A, torch.zeros(2, 5)), Shard(B, torch.zeros(3, 2))]
    adapter = SimpleNamespace(shards=lambda: [(shard.name, shard) for shard in shards])
    return SimpleNamespace(
        lora=LoraConfig(rank=2),
        hf={"model_type": "qwen3"},
        config=SimpleNamespace(num_moe_experts=None),
        adapters=[adapter],
        tensors={shard.name: shard.tensor for shard in shards},
    )


def write(directory, a, b):
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (directory / CONFIG).write_text(json.dumps(config))
    save_file({f"base_model.model.{A}": a, f"base_model.model.{B}": b}, directory / WEIGHTS)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn]
)
def test_any_floating_point_type_is_read(policy, tmp_path, dtype):
    a, b = torch.randn(2, 5).to(dtype), torch.randn(3, 2).to(dtype)
    write(tmp_path, a, b)
    import_adapters(policy, tmp_path)
    assert torch.equal(policy.tensors[A], a.float()) and torch.equal(policy.tensors[B], b.float())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (math.nan, "has numbers that are not finite"),
        (-math.inf, "has numbers that are not finite"),
        (1e300, "has numbers up to 1e+300, which torch.float32 cannot hold"),
    ],
)
def test_numbers_that_no_adapter_has_are_refused(policy, tmp_path, number, words):
    b = torch.ones(3, 2, dtype=torch.float64)
    b[1, 1] = number
    write(tmp_path, torch.ones(2, 5), b)
    with pytest.raises(CheckpointError) as caught:
        import_adapters(policy, tmp_path)
    assert B in caught.value.message and words in caught.value.message
    assert caught.value.where == str(tmp_path) and caught.value.remedy
