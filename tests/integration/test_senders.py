"""Several senders whose ranks gather for each other, without an engine at the other end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.trainer.requests import JoinTransfer, OpenTransfer, SendWeights
from grpo_megatron.weights.transfer import WeightReceiver
from tests.integration.conftest import trainer_config
from tests.trainer.models import DENSE, MOE, write_model

pytestmark = pytest.mark.engine

CASES = "tests.integration.trainer_side:"
LAYOUTS = {  # with two senders: ranks of one tensor group, one stage, or two stages
    "tp2": (2, "dense", {"tensor_parallel_size": 2}),
    "dp2": (2, "dense", {}),
    "ep2": (2, "moe", {"expert_parallel_size": 2}),
    "tp2_pp2": (4, "dense", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp4": (4, "dense", {"tensor_parallel_size": 4}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Large enough for several buckets of the smallest size a sender."""
    root = tmp_path_factory.mktemp("models")
    wide = {"intermediate_size": 4096, "num_key_value_heads": 4}
    experts = {"num_hidden_layers": 2, "moe_intermediate_size": 2048}
    return {
        "dense": write_model(root / "dense", DENSE | wide, 1),
        "moe": write_model(root / "moe", MOE | experts, 2),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_arrives_from_two_senders(request, models, layout):
    num_ranks, kind, parallel = LAYOUTS[layout]
    group = request.getfixturevalue(f"world{num_ranks}")
    config = trainer_config(num_ranks, parallel, {"num_senders": 2, "bucket_mib": 1}, 1.0)
    group.run(CASES + "start", config=config, model=models[kind])
    opened = group.run(CASES + "execute", request=OpenTransfer(num_workers=1))
    plan = opened.plan
    assert all(len(plan.buckets(sender)) > 3 for sender in range(2))
    received: dict[str, torch.Tensor] = {}

    def receive() -> dict[str, str]:
        receiver = WeightReceiver(opened.senders, rank=1, world_size=2, timeout_s=300)
        return receiver.receive(plan, received.update, publish=3)

    with ThreadPoolExecutor(1) as pool:
        digests = pool.submit(receive)
        group.run(CASES + "execute", request=JoinTransfer())
        sent = group.run(CASES + "execute", request=SendWeights(version=3))
        assert digests.result() == sent
    expected = load_file(f"{models[kind]}/model.safetensors")
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], expected[name]) for name in expected)
