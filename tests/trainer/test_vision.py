"""Qwen2.5-VL: the trainer computes what transformers does, at every layout, and its weights come
back bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiers import rest_in_matrix
from tests.trainer.test_layout_parity import TOLERANCE, assert_same
from tests.trainer.vision import (
    TOWERS,
    reference_features,
    reference_gradients,
    reference_logprobs,
    write_vision_model,
    write_vision_samples,
)

PARITY = "tests.trainer.vision_ranks:parity"
GRADIENTS = "tests.trainer.family_ranks:gradients"
LIKELIHOOD = "tests.trainer.vision_ranks:likelihood_step"
Layout = tuple[int, dict[str, Any]]
"""Ranks, and settings of the trainer."""
LAYOUTS: dict[str, Layout] = {
    "one": (1, {}),
    "apart": (1, {"share_prefixes": False}),
    "tp2_sp": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
}
TOWER_LAYOUTS = {
    **LAYOUTS,
    "tp2_whole": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "dp2_overlap": (2, {"overlap_communication": True}),
    "pp2_recompute": (2, {"pipeline_parallel_size": 2, "recompute": "full"}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "cp2_tp2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "cp2_pp2": (4, {"context_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2_dp2": (4, {"tensor_parallel_size": 2, "max_tokens_per_microbatch": 64}),
}
"""Those at which a tower is trained, of which the gate has `TOWER_GATE`."""
FROZEN_GATE = ("tp2_sp", "pp2", "pp2_vpp2", "dp2")
TOWER_GATE = ("tp2_sp", "tp2_whole", "pp2_recompute")


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def seen_samples(seeing_model, tmp_path_factory) -> str:
    return write_vision_samples(tmp_path_factory.mktemp("vision") / "step_000000", seeing_model)


@pytest.fixture(scope="module")
def expected(seeing_model, seen_samples) -> list[np.ndarray]:
    return reference_logprobs(seeing_model, seen_samples)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_are_those_of_transformers(request, seeing_model, seen_samples, expected, layout):
    assert_logprobs(request, LAYOUTS[layout], seeing_model, seen_samples, expected)


def assert_logprobs(
    request, layout: Layout, model: str, samples: str, expected: list[np.ndarray]
) -> None:
    """Those of every sample; and every tensor comes back as it was in the checkpoint."""
    found = run_at(request, layout, PARITY, model, samples)
    assert found["wrong"] == []
    assert sorted(found["logprobs"]) == list(range(len(expected)))
    for row, wanted in enumerate(expected):
        np.testing.assert_allclose(found["logprobs"][row], wanted, atol=1e-5)


def run_at(request, layout: Layout, case: str, model: str, samples: str, **trainer):
    """What a case finds with so many ranks. trainer: further settings of it."""
    ranks, sizes = layout
    group = request.getfixturevalue(f"world{ranks}")
    sizes = {"max_tokens_per_microbatch": 128, **trainer, **sizes}
    return group.run(case, model=model, samples=samples, layout=sizes)


def test_other_images_give_other_logprobs(expected):
    """The first and the fifth prompt have equal tokens: without their images they would agree."""
    first, fifth = expected[0], expected[12]
    assert abs(first[0] - fifth[0]) > 1e-3


@pytest.fixture(scope="module")
def gradients_of_one_rank(world1, seeing_model, seen_samples):
    """With a frozen tower, and every sample computed alone."""
    layout = {"max_tokens_per_microbatch": 128, "share_prefixes": False}
    return world1.run(GRADIENTS, model=seeing_model, samples=seen_samples, layout=layout)


@pytest.mark.parametrize(
    "layout", rest_in_matrix(("tp2_sp", "pp2", "pp2_vpp2", "dp2", "cp2"), FROZEN_GATE)
)
def test_gradients_do_not_depend_on_the_layout(
    request, gradients_of_one_rank, seeing_model, seen_samples, layout
):
    many = run_at(request, LAYOUTS[layout], GRADIENTS, seeing_model, seen_samples)
    assert_same(many, gradients_of_one_rank)
    assert not [name for name in many["tensors"] if name.startswith("visual.")]


@pytest.fixture(scope="module")
def gradients_of_transformers(seeing_model, seen_samples):
    return reference_gradients(seeing_model, seen_samples)


@pytest.mark.parametrize("layout", rest_in_matrix(TOWER_LAYOUTS, TOWER_GATE))
def test_a_trained_tower_has_the_gradients_of_transformers(
    request, gradients_of_transformers, expected, seeing_model, seen_samples, layout
):
    """In the norm once, and the same on every rank that has the tower."""
    found = run_at(
        request,
        TOWER_LAYOUTS[layout],
        LIKELIHOOD,
        seeing_model,
        seen_samples,
        vision_tower="trained",
    )
    assert_tower(found, TOWER_LAYOUTS[layout], expected, gradients_of_transformers)


def assert_tower(
    found: dict,
    layout: Layout,
    logprobs: list[np.ndarray],
    gradients: tuple[dict[str, np.ndarray], float],
    prefix: str = TOWERS["qwen2_5_vl"],
) -> None:
    """It has these gradients, and is on every rank of the first stage."""
    loss = -sum(float(of_sample.sum()) for of_sample in logprobs)
    assert_trained_as_by_transformers(found, loss, gradients, prefix)
    ranks, sizes = layout
    assert len(found["towers"]) == ranks // sizes.get("pipeline_parallel_size", 1)


def assert_trained_as_by_transformers(
    found: dict,
    loss: float,
    gradients: tuple[dict[str, np.ndarray], float],
    prefix: str = TOWERS["qwen2_5_vl"],
) -> None:
    """Loss, norm and the gradients of the tower, whose names begin with `prefix`; all ranks that
    have it hold the same."""
    of_tower, norm = gradients
    in_tower = {}
    for name, gradient in found["tensors"].items():
        if name.startswith(prefix):
            in_tower[name] = gradient
    wanted = {"losses": [loss], "norms": [norm], "tensors": of_tower}
    assert_same({**found, "tensors": in_tower}, wanted, 10 * TOLERANCE)
    assert len(set(found["towers"])) == 1


def test_a_trained_tower_where_a_last_row_has_no_images(world2, seeing_model, tmp_path):
    """Reductions that overlap with its backward wait for the tower all the same."""
    sizes = [[(200, 190)], [], [(190, 200)], [(60, 60)]]
    samples = write_vision_samples(
        tmp_path / "step_000000", seeing_model, num_samples=1, sizes_of_prompts=sizes
    )
    layout = {
        "overlap_communication": True,
        "vision_tower": "trained",
        "max_tokens_per_microbatch": 64,  # one sample
    }
    found = world2.run(LIKELIHOOD, model=seeing_model, samples=samples, layout=layout, another=True)
    assert [True, False] in found["have_images"]
    logprobs = reference_logprobs(seeing_model, samples)
    loss = -sum(float(of_sample.sum()) for of_sample in logprobs)
    gradients = reference_gradients(seeing_model, samples)
    assert_trained_as_by_transformers(found, loss, gradients)


@pytest.mark.parametrize(
    "layout", rest_in_matrix(("tp2_sp", "dp2_overlap", "tp2_dp2"), ("tp2_sp",))
)
def test_towers_stay_equal_where_the_optimizer_is_distributed(
    request, gradients_of_transformers, seeing_model, seen_samples, layout
):
    ranks, sizes = TOWER_LAYOUTS[layout]
    group = request.getfixturevalue(f"world{ranks}")
    sizes = {"max_tokens_per_microbatch": 128, "vision_tower": "trained", **sizes}
    found = group.run(
        LIKELIHOOD, model=seeing_model, samples=seen_samples, layout=sizes, shards=True
    )
    _, norm = gradients_of_transformers
    np.testing.assert_allclose(found["norms"], [norm], rtol=10 * TOLERANCE)
    assert len(found["towers"]) == ranks
    assert len(set(found["towers"])) == 1


def test_features_in_bfloat16_are_those_of_transformers(world1, seeing_model, seen_samples):
    """Weights are rounded, and rotary frequencies are not."""
    found = world1.run(
        "tests.trainer.vision_ranks:features", model=seeing_model, samples=seen_samples
    )
    expected = reference_features(seeing_model, seen_samples, torch.bfloat16)
    np.testing.assert_array_equal(found, expected)
