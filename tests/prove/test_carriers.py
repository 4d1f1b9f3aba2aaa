"""Which GPUs the members of `carriers` get, and what a recipe's weights are carried by."""

from __future__ import annotations

import pytest

from grpo_megatron.plan.resolve import resolve
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.parts.carriers import carriers_of


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (1, {"gloo": [0, 0, 0], "ipc": [0, 0, 0], "nccl": [0]}),
        (2, {"gloo": [0, 0, 0], "ipc": [0, 0, 1], "nccl": [0, 1]}),
        (8, {"gloo": [0, 0, 0], "ipc": [0, 0, 1], "nccl": [0, 1, 2]}),
    ],
)
def test_nccl_takes_no_gpu_twice_and_ipc_is_tried_on_one(num_gpus, expected):
    assert carriers_of(Conditions(device="cuda", num_gpus=num_gpus)) == expected


SEPARATE = ("placement.gpus_per_node=8", "placement.rollout_nodes=1")
COLOCATED = ("placement.gpus_per_node=8", "placement.mode=colocated")


@pytest.mark.parametrize(
    ("placement", "method", "carrier"),
    [
        ((), "auto", "gloo"),
        (SEPARATE, "auto", "nccl"),
        (COLOCATED, "auto", "ipc"),
        (COLOCATED, "gloo", "gloo"),
        (SEPARATE, "ipc", "ipc"),
        (SEPARATE, "gloo", "gloo"),
        (SEPARATE, "nccl", "nccl"),
    ],
)
def test_what_carries_weights(placement, method, carrier):
    settings = [f"publish.method={method}", *placement]
    config = resolve("demo/gspo-moe-cpu", settings).config
    assert config.publish_carrier == carrier
