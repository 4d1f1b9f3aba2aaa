"""The CPU platform: nothing is touched where CUDA exists; what it replaces behaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SNAPSHOT = """
import sys, torch
def snapshot():
    owners = {"torch": torch, "cuda": torch.cuda, "Tensor": torch.Tensor}
    return {(o, n): id(vars(owner)[n]) for o, owner in owners.items() for n in vars(owner)
            if not n.startswith("__")}
before = snapshot()
torch.cuda.is_available = lambda: CUDA
before["cuda", "is_available"] = id(torch.cuda.is_available)
from grpo_megatron.trainer.megatron import cpu_platform
cpu_platform.install()
changed = sorted(k for k, v in snapshot().items() if k in before and before[k] != v)
print(len(changed), "megatron" in sys.modules)
"""


@pytest.mark.parametrize("cuda", [True, False])
def test_nothing_is_replaced_where_cuda_exists(cuda):
    script = SNAPSHOT.replace("CUDA", str(cuda))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        text=True,
        capture_output=True,
        check=True,
    )
    changed, imported = result.stdout.split()
    assert (changed == "0") == cuda
    assert imported == str(not cuda)


def test_megatron_must_not_come_first():
    script = (
        "import sys\n"
        "sys.modules['megatron.core.tensor_parallel.random'] = sys  # as if imported\n"
        "from grpo_megatron.trainer.megatron import cpu_platform\n"
        "cpu_platform.install()"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], text=True, capture_output=True
    )
    assert "ImportError: megatron was imported before" in result.stderr


def test_default_devices_still_reach_the_constructors(world1):
    """Otherwise transformers, which builds models on the meta device, computes with whatever was
    in memory."""
    by_default, named_cuda = world1.run("tests.trainer.numbers:kinds_of_device")
    assert by_default == ["meta"] * 4
    assert named_cuda == "cpu"


def random_numbers(group, layout, seed):
    return group.run("tests.trainer.numbers:random_numbers", layout=layout, seed=seed)


def test_random_numbers_of_tensor_and_data_parallel_ranks(world4):
    """Equal across data parallelism; within a tensor-parallel region ranks differ."""
    ranks = random_numbers(world4, {"tensor_parallel_size": 2}, 7)
    assert len({rank["default"] for rank in ranks}) == 1
    by_tensor_rank = {}
    for rank in ranks:
        by_tensor_rank.setdefault(rank["tensor_rank"], set()).add(rank["region"])
    assert [len(found) for found in by_tensor_rank.values()] == [1, 1]
    assert len(set.union(*by_tensor_rank.values())) == 2


def test_random_numbers_of_expert_parallel_ranks(world2):
    first, second = random_numbers(world2, {"expert_parallel_size": 2}, 7)
    assert first["region"] == second["region"]
    assert first["expert_region"] != second["expert_region"]


def test_random_numbers_repeat_with_the_seed(world1):
    first, again, other = (random_numbers(world1, {}, seed) for seed in (7, 7, 8))
    assert first == again
    assert all(first[0][name] != other[0][name] for name in ("default", "region"))
