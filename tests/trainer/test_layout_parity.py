"""Loss, gradients, pre-clip gradient norm and trained weights do not depend on the layout.

These run on gloo with CPU kernels: they say nothing about NCCL, CUDA streams or fused kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers import rest_in_matrix

TOLERANCE = 1e-5
LOSS_NOISE = 5e-7
"""Half of the last digit of log-probs beyond -8 (9.5e-7). Losses are sums of terms of about 1 that
cancel, to 0.007 in the second update: on one rank, too, another split into micro-batches moves them
by up to 1.5e-7, and kernels of another CPU by 1.9e-7. Norms and gradients are held to TOLERANCE."""

LAYOUTS_2 = {
    "dp2": {},
    "dp2_overlap": {"overlap_communication": True},
    "tp2_sp": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2_vpp2": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    "pp2_recompute": {"pipeline_parallel_size": 2, "recompute": "full"},
    "ep2": {"expert_parallel_size": 2},
    "ep2_selective": {"expert_parallel_size": 2, "recompute": "selective"},
    "tp2_etp1": {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "cp2": {"context_parallel_size": 2},
    "cp2_ep2": {"context_parallel_size": 2, "expert_parallel_size": 2},
}
LAYOUTS_4 = {
    "pp2_ep2": {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
    "tp2_sp_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep2_overlap": {"expert_parallel_size": 2, "overlap_communication": True},
    "etp2_ep2": {
        "tensor_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "expert_parallel_size": 2,
    },
    "tp2_ep4_etp1": {
        "tensor_parallel_size": 2,
        "expert_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    },
    "pp2_vpp2_ep2_recompute": {
        "pipeline_parallel_size": 2,
        "virtual_pipeline_parallel_size": 2,
        "expert_parallel_size": 2,
        "recompute": "full",
    },
    "cp4": {"context_parallel_size": 4},
    "cp2_tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    "cp2_dp2_ep2": {"context_parallel_size": 2, "expert_parallel_size": 2},
    "cp2_pp2": {"context_parallel_size": 2, "pipeline_parallel_size": 2},
    "cp2_pp2_vpp2_ep2_recompute": {
        "context_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_parallel_size": 2,
        "expert_parallel_size": 2,
        "recompute": "full",
    },
}
TRAIN = "tests.trainer.trainer_ranks:train_updates"


APART = {"share_prefixes": False}
OF_PACKING = ("batch/computed_token_fraction", "routing/split_prompts")
"""Metrics of what is shared, which differ with the layout."""


@pytest.fixture(scope="session")
def reference(world1, moe_model, three_updates):
    """One rank, every sample computed alone; the layouts compute prompts once."""
    return world1.run(TRAIN, model=moe_model, samples=three_updates, layout=APART)


@pytest.fixture(scope="session")
def reference_gradients(world1, moe_model, samples):
    return world1.run(TRAIN, model=moe_model, samples=samples, layout=APART, gradients=True)


def assert_same(found: dict, expected: dict, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance, atol=LOSS_NOISE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=tolerance)
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        scale = np.abs(tensor).max()
        worst = np.abs(found["tensors"][name] - tensor).max()
        assert worst <= tolerance * max(scale, 1e-3), f"{name}: {worst} of {scale}"


def test_the_reference_trains(reference):
    assert len(set(reference["losses"])) == 3
    assert reference["num_microbatches"] > 2
    assert reference["computed_fraction"] == 1


def test_shared_prompts_on_one_rank(world1, reference, moe_model, three_updates):
    found = world1.run(TRAIN, model=moe_model, samples=three_updates, layout={})
    assert found["computed_fraction"] < 0.8
    np.testing.assert_allclose(
        found["losses"], reference["losses"], rtol=TOLERANCE, atol=LOSS_NOISE
    )
    np.testing.assert_allclose(found["norms"], reference["norms"], rtol=TOLERANCE)


def test_gradients_of_shared_prompts(world1, reference_gradients, moe_model, samples):
    found = world1.run(TRAIN, model=moe_model, samples=samples, layout={}, gradients=True)
    assert_same(found, reference_gradients)


@pytest.mark.parametrize(
    "layout",
    ["dp2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2_sp", "cp2"))],
)
def test_two_ranks_that_share_nothing(world2, reference, moe_model, three_updates, layout):
    settings = {**LAYOUTS_2[layout], **APART}
    found = world2.run(TRAIN, model=moe_model, samples=three_updates, layout=settings)
    assert found["computed_fraction"] == 1
    np.testing.assert_allclose(
        found["losses"], reference["losses"], rtol=TOLERANCE, atol=LOSS_NOISE
    )
    np.testing.assert_allclose(found["norms"], reference["norms"], rtol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS_2)
def test_two_ranks_equal_one(world2, reference, moe_model, three_updates, layout):
    found = world2.run(TRAIN, model=moe_model, samples=three_updates, layout=LAYOUTS_2[layout])
    np.testing.assert_allclose(
        found["losses"], reference["losses"], rtol=TOLERANCE, atol=LOSS_NOISE
    )
    np.testing.assert_allclose(found["norms"], reference["norms"], rtol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS_2)
def test_gradients_of_two_ranks_equal_one(world2, reference_gradients, moe_model, samples, layout):
    found = world2.run(
        TRAIN, model=moe_model, samples=samples, layout=LAYOUTS_2[layout], gradients=True
    )
    assert_same(found, reference_gradients)


OVER_THREE_UPDATES = ("pp2_ep2", "etp2_ep2", "ep2_overlap", "cp2_pp2_vpp2_ep2_recompute")
"""Of four ranks, in the gate; of the others it has the gradients alone."""


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS_4, OVER_THREE_UPDATES))
def test_four_ranks_equal_one(world4, reference, moe_model, three_updates, layout):
    found = world4.run(TRAIN, model=moe_model, samples=three_updates, layout=LAYOUTS_4[layout])
    np.testing.assert_allclose(
        found["losses"], reference["losses"], rtol=TOLERANCE, atol=LOSS_NOISE
    )
    np.testing.assert_allclose(found["norms"], reference["norms"], rtol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS_4)
def test_gradients_of_four_ranks_equal_one(world4, reference_gradients, moe_model, samples, layout):
    found = world4.run(
        TRAIN, model=moe_model, samples=samples, layout=LAYOUTS_4[layout], gradients=True
    )
    assert_same(found, reference_gradients)


@pytest.mark.parametrize("preset", ["gspo", "grpo"])
@pytest.mark.parametrize("tokens", [24, 10_000])
def test_the_split_into_microbatches_does_not_matter(world1, moe_model, samples, preset, tokens):
    """10 000: everything in one micro-batch; 24: hardly two samples together."""
    arguments = {"model": moe_model, "samples": samples, "preset": preset, "gradients": True}
    expected = world1.run(TRAIN, layout=APART, **arguments)
    found = world1.run(TRAIN, layout={"max_tokens_per_microbatch": tokens}, **arguments)
    assert found["num_microbatches"] != expected["num_microbatches"]
    assert_same(found, expected)


@pytest.fixture(scope="module")
def of_dense_and_tied(world1, dense_model, tied_model, samples):
    """Every sample computed alone, by model."""
    found = {}
    for model in (dense_model, tied_model):
        found[model] = world1.run(TRAIN, model=model, samples=samples, layout=APART, gradients=True)
    return found


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "cp2"])
def test_dense_and_tied_models(world2, of_dense_and_tied, samples, layout):
    for model, expected in of_dense_and_tied.items():
        found = world2.run(
            TRAIN, model=model, samples=samples, layout=LAYOUTS_2[layout], gradients=True
        )
        assert_same(found, expected)
