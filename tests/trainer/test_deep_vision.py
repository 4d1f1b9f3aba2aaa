"""Qwen3-VL, whose tower has features for the outputs of the first layers too: the trainer computes
what transformers does, at every layout that it allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiers import rest_in_matrix
from tests.trainer.test_layout_parity import TOLERANCE, assert_same
from tests.trainer.test_vision import (
    GRADIENTS,
    LIKELIHOOD,
    PARITY,
    TOWER_LAYOUTS,
    assert_logprobs,
    assert_tower,
    run_at,
)
from tests.trainer.vision import (
    DEEP_VISION,
    TOWERS,
    reference_features,
    reference_gradients,
    reference_logprobs,
    write_vision_model,
    write_vision_samples,
)

pytestmark = pytest.mark.engine
TOWER = TOWERS["qwen3_vl"]
LAYOUTS = {name: layout for name, layout in TOWER_LAYOUTS.items() if name != "pp2_vpp2"}
"""Its two first layers would be on two stages (`tests/plan/test_vision.py`)."""
LAYOUTS["one_recompute"] = (1, {"recompute": "full"})


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("deep") / "model"
    return write_vision_model(directory, hf=DEEP_VISION)


@pytest.fixture(scope="module")
def deep_samples(deep_model, tmp_path_factory) -> str:
    return write_vision_samples(tmp_path_factory.mktemp("deep") / "step_000000", deep_model)


@pytest.fixture(scope="module")
def expected(deep_model, deep_samples) -> list[np.ndarray]:
    return reference_logprobs(deep_model, deep_samples)


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS, ("one",)))
def test_logprobs_are_those_of_transformers(request, deep_model, deep_samples, expected, layout):
    assert_logprobs(request, LAYOUTS[layout], deep_model, deep_samples, expected)


@pytest.fixture(scope="module")
def gradients_of_transformers(deep_model, deep_samples):
    return reference_gradients(deep_model, deep_samples)


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS, ("tp2_sp", "pp2_recompute")))
def test_a_trained_tower_has_the_gradients_of_transformers(
    request, gradients_of_transformers, expected, deep_model, deep_samples, layout
):
    """In the norm once, and the same on every rank that has the tower."""
    found = run_at(
        request, LAYOUTS[layout], LIKELIHOOD, deep_model, deep_samples, vision_tower="trained"
    )
    assert_tower(found, LAYOUTS[layout], expected, gradients_of_transformers, TOWER)


@pytest.fixture(scope="module")
def gradients_of_one_rank(world1, deep_model, deep_samples):
    """With a frozen tower, and every sample computed alone."""
    layout = {"max_tokens_per_microbatch": 128, "share_prefixes": False}
    return world1.run(GRADIENTS, model=deep_model, samples=deep_samples, layout=layout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ("one_recompute", "tp2_sp", "pp2", "dp2", "cp2"))
def test_gradients_do_not_depend_on_the_layout(
    request, gradients_of_one_rank, deep_model, deep_samples, layout
):
    many = run_at(request, LAYOUTS[layout], GRADIENTS, deep_model, deep_samples)
    assert_same(many, gradients_of_one_rank)
    assert not [name for name in many["tensors"] if name.startswith(TOWER)]


@pytest.mark.matrix
def test_a_row_without_images_beside_others(world2, deep_model, tmp_path):
    """Reductions that overlap with the backward wait for the tower all the same."""
    sizes = [[(224, 220)], [], [(220, 224)], [(60, 60)]]
    samples = write_vision_samples(
        tmp_path / "step_000000", deep_model, num_samples=1, sizes_of_prompts=sizes
    )
    layout = {
        "overlap_communication": True,
        "vision_tower": "trained",
        "max_tokens_per_microbatch": 64,  # one sample
    }
    found = world2.run(LIKELIHOOD, model=deep_model, samples=samples, layout=layout, another=True)
    assert [True, False] in found["have_images"]
    _, norm = reference_gradients(deep_model, samples)
    np.testing.assert_allclose(found["norms"], [norm], rtol=10 * TOLERANCE)


@pytest.mark.matrix
def test_features_in_bfloat16_are_those_of_transformers(world1, deep_model, deep_samples):
    """Weights are rounded, and rotary frequencies are not."""
    found = world1.run(
        "tests.trainer.vision_ranks:features", model=deep_model, samples=deep_samples
    )
    expected = reference_features(deep_model, deep_samples, torch.bfloat16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.matrix
def test_virtual_stages_whose_first_part_has_the_layers(world2, tmp_path):
    """Features of one block go to the first layer, which is alone in its part."""
    of_tower = DEEP_VISION["vision_config"] | {"deepstack_visual_indexes": [1]}
    model = write_vision_model(tmp_path / "model", hf={**DEEP_VISION, "vision_config": of_tower})
    samples = write_vision_samples(tmp_path / "step_000000", model)
    _, sizes = TOWER_LAYOUTS["pp2_vpp2"]
    layout = {"max_tokens_per_microbatch": 128, "vision_tower": "trained", **sizes}
    found = world2.run(LIKELIHOOD, model=model, samples=samples, layout=layout)
    loss = -sum(float(logprobs.sum()) for logprobs in reference_logprobs(model, samples))
    _, norm = reference_gradients(model, samples)
    np.testing.assert_allclose(found["losses"], [loss], rtol=10 * TOLERANCE)
    np.testing.assert_allclose(found["norms"], [norm], rtol=10 * TOLERANCE)


@pytest.mark.matrix
def test_a_first_stage_without_the_layers_is_refused_where_rules_were_not_asked(world2, deep_model):
    layout = TOWER_LAYOUTS["pp2_vpp2"][1]
    with pytest.raises(Exception, match="the first pipeline stage has 1 layers"):
        world2.run(PARITY, model=deep_model, samples="", layout=layout)
