"""The trainer's log-probs are those of transformers; packing changes none of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from tests.trainer.reference import reference_logprobs
from tests.trainer.test_layout_parity import assert_same

pytestmark = pytest.mark.engine

CASES = "tests.trainer.trainer_ranks:"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_logprobs_are_those_of_transformers(request, world1, samples, kind, temperature):
    model = request.getfixturevalue(f"{kind}_model")
    found = world1.run(
        CASES + "token_logprobs", model=model, samples=samples, layout={}, temperature=temperature
    )
    expected = np.concatenate(
        reference_logprobs(model, SampleTable(Path(samples)), temperature=temperature)
    )
    assert len(set(expected.tolist())) > 100
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_cold_start_trains_the_likelihood_at_temperature_1(world1, dense_model, samples):
    """Whatever the temperature at which the run samples, which holds again behind it."""
    nll, temperature = world1.run(
        "tests.trainer.cold_start_ranks:first_step",
        model=dense_model,
        samples=samples,
        temperature=0.25,
    )
    expected = np.concatenate(reference_logprobs(dense_model, SampleTable(Path(samples))))
    assert nll == pytest.approx(-expected.mean(), abs=1e-5)
    assert temperature == 0.25


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_rope_theta_has_two_spellings(request, world1, samples, kind):
    """transformers 4 and 5; another base gives other log-probs."""
    model = request.getfixturevalue(f"{kind}_model")

    def logprobs(**overrides):
        return world1.run(
            CASES + "token_logprobs",
            model=model,
            samples=samples,
            layout={},
            hf_overrides=overrides,
        )

    old = logprobs(rope_theta=500.0)
    new = logprobs(rope_theta=None, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    np.testing.assert_array_equal(old, new)
    assert np.abs(logprobs() - old).max() > 1e-3


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_packed_equals_alone(request, world1, samples, kind):
    """Each sample in a micro-batch of its own against all in one: log-probs and gradients."""
    model = request.getfixturevalue(f"{kind}_model")
    alone, packed = (
        world1.run(CASES + "gradients_of", model=model, samples=samples, alone=alone)
        for alone in (True, False)
    )
    assert (alone["num_microbatches"], packed["num_microbatches"]) == (24, 1)
    assert alone["logprobs"].keys() == packed["logprobs"].keys() == set(range(24))
    for row, logprobs in packed["logprobs"].items():
        np.testing.assert_allclose(logprobs, alone["logprobs"][row], atol=1e-5)
    assert_same(packed, alone)
