"""Optimizer state on the host computes what it does beside the weights, to the last bit."""

from __future__ import annotations

import pytest

from grpo_megatron.plan.rank_bytes import HOST_BYTES_PER_PARAMETER
from tests.device.test_parity import GRPO, LAYOUTS_2, UPDATE
from tests.device.test_whole import CHECKPOINTS

pytestmark = pytest.mark.device

RANKS = "tests.device.host_optimizer_ranks:"
BESIDE = {"precision": "bfloat16"}
ON_HOST = {**BESIDE, "offload_optimizer": True}
LAYOUTS = {**LAYOUTS_2, "dp2": {}}


def updates(group, model: str, samples: str, layout: dict) -> tuple[list[float], list[float]]:
    report = group.run(UPDATE, model=model, samples=samples, layout=layout, **GRPO).report
    assert len(report["losses"]) == 3
    return report["losses"], report["grad_norms"]


def test_one_rank(pretended1, moe_model, three_updates):
    found = updates(pretended1, moe_model, three_updates, ON_HOST)
    assert found == updates(pretended1, moe_model, three_updates, BESIDE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(pretended2, moe_model, three_updates, layout):
    found = updates(pretended2, moe_model, three_updates, {**LAYOUTS[layout], **ON_HOST})
    assert found == updates(pretended2, moe_model, three_updates, {**LAYOUTS[layout], **BESIDE})


def test_the_device_holds_none_of_it(pretended2, world2, moe_model):
    found = pretended2.run(RANKS + "where_state_is", model=moe_model, layout=ON_HOST)
    beside = pretended2.run(RANKS + "where_state_is", model=moe_model, layout=BESIDE)
    assert found["device"] == {**beside["device"], "optimizer": 0}
    parameters = beside["device"]["optimizer"] // 12
    assert found["host"] == parameters * (HOST_BYTES_PER_PARAMETER - 4)  # no gradient yet
    assert beside["host"] == 0
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert (found["state"], beside["state"]) == ("host", None)
    on_cpu = world2.run(RANKS + "where_state_is", model=moe_model, layout=ON_HOST)
    assert on_cpu["state"] == "beside the weights"


def test_a_reset_forgets_moments_and_steps(pretended1, moe_model, samples):
    arguments = {"model": moe_model, "samples": samples}
    first, second = pretended1.run(RANKS + "after_a_reset", layout=ON_HOST, **arguments)
    assert second == first
    assert first == pretended1.run(RANKS + "after_a_reset", layout=BESIDE, **arguments)[0]


def test_no_class_is_saved(pretended1, dense_model):
    before, after = pretended1.run(RANKS + "saved_groups", model=dense_model, layout=ON_HOST)
    assert before == ["cpu_optimizer_cls", "gpu_optimizer_cls"]
    assert after == []


@pytest.mark.parametrize("layout", ["tp2_sp", "dp2"])
def test_a_checkpoint_resumes_with_the_state_in_either_place(
    pretended2, moe_model, samples, tmp_path, layout
):
    """Saved while training goes on; read by a run that has it on the host and by one without."""
    places = {"host": {**LAYOUTS[layout], **ON_HOST}, "beside": {**LAYOUTS[layout], **BESIDE}}
    arguments = {"model": moe_model, "samples": samples}
    saved = {}
    for name, trainer in places.items():
        directory = str(tmp_path / name)
        saved[name] = pretended2.run(
            CHECKPOINTS + "save_after", directory=directory, steps=2, layout=trainer, **arguments
        )
        for other in places.values():
            resumed = pretended2.run(
                CHECKPOINTS + "resume_fresh", directory=directory, layout=other, **arguments
            )
            assert resumed["metrics"] == saved[name]["metrics"]
    assert saved["host"]["metrics"] == saved["beside"]["metrics"]
