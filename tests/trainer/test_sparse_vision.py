"""Qwen3-VL with experts: the trainer computes what transformers does, at layouts that divide its
experts, and every expert comes back as it was in its stack."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiers import rest_in_matrix
from tests.trainer.test_layout_parity import assert_same
from tests.trainer.test_vision import (
    GRADIENTS,
    LIKELIHOOD,
    assert_logprobs,
    assert_tower,
    run_at,
)
from tests.trainer.vision import (
    SPARSE_VISION,
    TOWERS,
    reference_gradients,
    reference_logprobs,
    write_vision_model,
    write_vision_samples,
)

pytestmark = pytest.mark.engine
TOWER = TOWERS["qwen3_vl_moe"]
TP_AND_EP = {
    "tensor_parallel_size": 2,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}
LAYOUTS = {
    "one": (1, {}),
    "apart": (1, {"share_prefixes": False}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "tp2_sp": (2, {"tensor_parallel_size": 2}),
    "tp2_ep2": (2, TP_AND_EP),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "pp2_recompute": (2, {"pipeline_parallel_size": 2, "recompute": "full"}),
    "tp2_ep2_pp2": (4, {**TP_AND_EP, "pipeline_parallel_size": 2}),
    "ep4": (4, {"expert_parallel_size": 4}),
}


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("sparse") / "model"
    return write_vision_model(directory, hf=SPARSE_VISION)


@pytest.fixture(scope="module")
def sparse_samples(sparse_model, tmp_path_factory) -> str:
    return write_vision_samples(tmp_path_factory.mktemp("sparse") / "step_000000", sparse_model)


@pytest.fixture(scope="module")
def expected(sparse_model, sparse_samples) -> list[np.ndarray]:
    return reference_logprobs(sparse_model, sparse_samples)


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS, ("tp2_ep2",)))
def test_logprobs_are_those_of_transformers(
    request, sparse_model, sparse_samples, expected, layout
):
    assert_logprobs(request, LAYOUTS[layout], sparse_model, sparse_samples, expected)


@pytest.fixture(scope="module")
def gradients_of_transformers(sparse_model, sparse_samples):
    return reference_gradients(sparse_model, sparse_samples)


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS, ("ep2",)))
def test_a_trained_tower_has_the_gradients_of_transformers(
    request, gradients_of_transformers, expected, sparse_model, sparse_samples, layout
):
    """In the norm once, and the same on every rank that has the tower."""
    found = run_at(
        request, LAYOUTS[layout], LIKELIHOOD, sparse_model, sparse_samples, vision_tower="trained"
    )
    assert_tower(found, LAYOUTS[layout], expected, gradients_of_transformers, TOWER)


@pytest.fixture(scope="module")
def gradients_of_one_rank(world1, sparse_model, sparse_samples):
    """With a frozen tower, and every sample computed alone."""
    layout = {"max_tokens_per_microbatch": 128, "share_prefixes": False}
    return world1.run(GRADIENTS, model=sparse_model, samples=sparse_samples, layout=layout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("one", "apart")])
def test_gradients_do_not_depend_on_the_layout(
    request, gradients_of_one_rank, sparse_model, sparse_samples, layout
):
    many = run_at(request, LAYOUTS[layout], GRADIENTS, sparse_model, sparse_samples)
    assert_same(many, gradients_of_one_rank)
    assert not [name for name in many["tensors"] if name.startswith(TOWER)]
