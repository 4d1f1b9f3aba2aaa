"""Qwen2.5-VL: the trainer computes what transformers does, at every layout, and its weights come
back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.test_layout_parity import assert_same
from tests.trainer.vision import (
    reference_features,
    reference_logprobs,
    write_vision_model,
    write_vision_samples,
)

PARITY = "tests.trainer.vision_ranks:parity"
GRADIENTS = "tests.trainer.family_ranks:gradients"
LAYOUTS = {
    "one": (1, {}),
    "apart": (1, {"share_prefixes": False}),
    "tp2_sp": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "dp2": (2, {}),
}


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
    ranks, sizes = LAYOUTS[layout]
    sizes = {"max_tokens_per_microbatch": 128, **sizes}
    group = request.getfixturevalue(f"world{ranks}")
    found = group.run(PARITY, model=seeing_model, samples=seen_samples, layout=sizes)
    assert found["wrong"] == []
    assert sorted(found["logprobs"]) == list(range(len(expected)))
    for row, wanted in enumerate(expected):
        np.testing.assert_allclose(found["logprobs"][row], wanted, atol=1e-5)


def test_other_images_give_other_logprobs(expected):
    """The first and the fifth prompt have equal tokens: without their images they would agree."""
    first, fifth = expected[0], expected[12]
    assert abs(first[0] - fifth[0]) > 1e-3


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2", "pp2_vpp2", "dp2"])
def test_gradients_do_not_depend_on_the_layout(request, world1, seeing_model, seen_samples, layout):
    ranks, sizes = LAYOUTS[layout]
    group = request.getfixturevalue(f"world{ranks}")
    found = []
    for workers, of_layout in ((world1, {"share_prefixes": False}), (group, sizes)):
        of_layout = {"max_tokens_per_microbatch": 128, **of_layout}
        found.append(
            workers.run(GRADIENTS, model=seeing_model, samples=seen_samples, layout=of_layout)
        )
    one, many = found
    assert_same(many, one)
    assert not [name for name in one["tensors"] if name.startswith("visual.")]


def test_features_in_bfloat16_are_those_of_transformers(world1, seeing_model, seen_samples):
    """Weights are rounded, and rotary frequencies are not."""
    found = world1.run(
        "tests.trainer.vision_ranks:features", model=seeing_model, samples=seen_samples
    )
    expected = reference_features(seeing_model, seen_samples, torch.bfloat16)
    np.testing.assert_array_equal(found, expected)
