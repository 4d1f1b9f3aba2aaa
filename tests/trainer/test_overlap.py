"""A forward gathers the weights that it computes with, whoever asks for it."""

from __future__ import annotations

import numpy as np
import pytest

STEP = "tests.trainer.overlap_ranks:step_without_gather"


@pytest.mark.parametrize("model", ["moe_model", "tied_model"])
def test_a_pass_after_a_step_computes_with_its_weights(request, world2, samples, model):
    path = request.getfixturevalue(model)
    apart = {
        "share_prefixes": False
    }  # what is held here is that weights are whole, not how rows are
    found = world2.run(STEP, model=path, samples=samples, layout=apart)
    before_gather, after_gather, at_once = found["passes"]
    assert max(found["differing"]) > 0, "the step gathered by itself, so this shows nothing"
    np.testing.assert_array_equal(before_gather, after_gather)
    np.testing.assert_allclose(after_gather, at_once, atol=1e-6)
