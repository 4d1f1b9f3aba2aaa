"""What a trainer does beside RL updates, whole, on a pretended GPU: equal to plain ranks.

Sleeping and waking of colocated engines has no half in the trainer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.device.test_parity import TOLERANCE
from tests.trainer.models import MOE, write_model, write_samples

pytestmark = pytest.mark.device

WHOLE = "tests.device.whole_ranks:"
CHECKPOINTS = "tests.checkpoints.checkpoint_ranks:"
TRAINER = "tests.trainer.trainer_ranks:"


def assert_close(found, expected, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def assert_same_tensors(found, expected, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=tolerance, err_msg=name)


# --- publishing


LINKS = {"nccl": "nccl", "ipc": "gpu memory", "gloo": "host memory"}


@pytest.mark.parametrize("carrier", LINKS)
def test_a_publish_sends_what_the_cpu_sends(pretended1, world1, moe_model, carrier):
    arguments = {"model": moe_model, "layout": {}}
    found = pretended1.run(WHOLE + "publish", carrier=carrier, **arguments)
    expected = world1.run(WHOLE + "publish", **arguments)
    assert found["links"] == {LINKS[carrier]: 2}
    assert found["received"] == [found["sent"]] * 2
    assert found["sent"] == expected["sent"]
    assert found["tensors"] == expected["tensors"]


@pytest.mark.parametrize("carrier", ["nccl", "ipc"])
def test_two_ranks_with_experts_of_their_own(pretended2, world2, moe_model, carrier):
    layout = {"expert_parallel_size": 2}
    arguments = {"model": moe_model, "layout": layout}
    found = pretended2.run(WHOLE + "publish", carrier=carrier, **arguments)
    expected = world2.run(WHOLE + "publish", **arguments)
    assert found.pop("links") == {LINKS[carrier]: 3}
    assert expected.pop("links") == {"host memory": 3}
    assert found["received"] == [found["sent"]] * 2
    assert found == expected


def test_weights_are_rounded_to_fp8_where_they_are(pretended1, world1, moe_model):
    arguments = {"model": moe_model, "layout": {}, "in_fp8": True}
    found = pretended1.run(WHOLE + "publish", carrier="ipc", **arguments)
    expected = world1.run(WHOLE + "publish", **arguments)
    assert found["received"] == [found["sent"]] * 2
    assert found["sent"] == expected["sent"]
    assert any(name.endswith("_scale_inv") for name in found["tensors"])


def test_without_a_gpu_ipc_goes_through_host_memory(world1, moe_model):
    found = world1.run(WHOLE + "publish", model=moe_model, layout={}, carrier="ipc")
    assert found["links"] == {"host memory": 2}
    assert found["received"] == [found["sent"]] * 2


def test_memory_that_cannot_be_read_is_not_relied_on(pretended1):
    found = pretended1.run(WHOLE + "readable_members")
    assert [name for name, is_read in found.items() if is_read] == ["as it is"]


# --- checkpoints


def test_a_checkpoint_resumes_on_either_side(pretended1, world1, moe_model, samples, tmp_path):
    """Saved on the pretended GPU, resumed there and on the CPU; and the other way round."""
    arguments = {"model": moe_model, "samples": samples, "layout": {}}
    saved = {}
    for name, group in (("pretended", pretended1), ("plain", world1)):
        saved[name] = group.run(
            CHECKPOINTS + "save_after", directory=str(tmp_path / name), steps=2, **arguments
        )
    # after two of Adam's steps of 1e-3: a tenth of one
    assert_same_tensors(saved["pretended"]["saved"], saved["plain"]["saved"], 1e-4)
    for name in saved:
        by_group = []
        for group in (pretended1, world1):
            resumed = group.run(
                CHECKPOINTS + "resume_fresh", directory=str(tmp_path / name), **arguments
            )
            by_group.append(resumed)
        for resumed, kind in zip(by_group, ("pretended", "plain"), strict=True):
            if kind == name:  # nothing was lost on the way
                assert resumed["metrics"] == saved[name]["metrics"]
        assert_same_tensors(by_group[0]["tensors"], by_group[1]["tensors"], 1e-4)


# --- adapters


def test_adapters_of_domains_rest_on_the_host_and_come_back(
    pretended1, world1, moe_model, tmp_path
):
    steps = []
    for number in range(2):
        step = write_samples(tmp_path / f"step_{number:06d}", seed=number, num_domains=2)
        steps.append(step)
    arguments = {"model": moe_model, "steps": steps}
    found = pretended1.run(WHOLE + "train_domains", **arguments)
    expected = world1.run(WHOLE + "train_domains", **arguments)
    assert_same_tensors(found, expected, 1e-4)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    assert np.abs(found[f"even/{name}"] - found[f"odd/{name}"]).max() > 1e-4


# --- conversion


def test_conversion_there_and_back(pretended1, moe_model, tmp_path):
    """Read back and compared with transformers' log-probs, as the command does it."""
    there, back = tmp_path / "megatron", tmp_path / "hf"
    job = {"layout": {}, "shard_bytes": 100_000, "probe": True}
    pretended1.run(
        WHOLE + "convert", job={**job, "source": moe_model, "target": str(there), "to": "megatron"}
    )
    pretended1.run(
        WHOLE + "convert", job={**job, "source": str(there), "target": str(back), "to": "hf"}
    )
    assert_same_files(back, Path(moe_model))


def assert_same_files(found: Path, expected: Path) -> None:
    """Bit for bit."""
    by_directory = []
    for directory in (found, expected):
        tensors = {}
        for file in directory.glob("*.safetensors"):
            tensors.update(load_file(file))
        by_directory.append(tensors)
    first, second = by_directory
    assert first.keys() == second.keys() and first
    for name, tensor in second.items():
        np.testing.assert_array_equal(first[name], tensor, err_msg=name)


# --- other kinds of training


@pytest.fixture(scope="session")
def teachers(tmp_path_factory) -> list[str]:
    directory = tmp_path_factory.mktemp("teachers")
    return [write_model(directory / str(seed), MOE, seed) for seed in (21, 22)]


@pytest.mark.parametrize("mode", ["full", "topk_tail", "sampled"])
def test_distillation(pretended1, world1, moe_model, teachers, two_domains, mode):
    distillation = {
        "teachers": [
            {"path": teachers[0], "weight": 0.5},
            {"path": teachers[1], "domains": ["odd"], "weight": 2.0},
        ],
        "mode": mode,
        "top_k": 5,
    }
    arguments = {
        "model": moe_model,
        "samples": two_domains,
        "layout": {},
        "distillation": distillation,
    }
    found = pretended1.run(TRAINER + "distil", **arguments)
    expected = world1.run(TRAINER + "distil", **arguments)
    assert found["unchanged"]
    assert_close(found["losses"], expected["losses"])
    assert_close(found["norms"], expected["norms"])
    assert_same_tensors(found["tensors"], expected["tensors"])


@pytest.fixture(scope="session")
def two_domains(tmp_path_factory) -> str:
    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", num_domains=2)


def test_supervised_steps(pretended1, world1, moe_model, two_domains):
    arguments = {"model": moe_model, "samples": two_domains, "routing": {}}
    found = pretended1.run(TRAINER + "supervise", **arguments)
    expected = world1.run(TRAINER + "supervise", **arguments)
    assert_close(found["losses"], expected["losses"])
    assert_close(found["grad_norms"], expected["grad_norms"])


def test_a_recorded_step_is_trained_again(pretended1, moe_model, tmp_path):
    """With the decisions of the first time, which were written from the device."""
    samples = write_samples(tmp_path / "step_000001", num_updates=3, num_domains=2)
    first, again = pretended1.run(
        WHOLE + "replay", model=moe_model, samples=samples, objective={"preset": "grpo"}
    )
    assert first["losses"] == again["losses"] and first["grad_norms"] == again["grad_norms"]
    assert again["metrics"]["replay/decisions_changed"] == 0.0
