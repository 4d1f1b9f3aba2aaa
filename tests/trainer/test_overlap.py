"""A forward gathers the weights that it computes with, whoever asks for it."""

from __future__ import annotations

import numpy as np
import pytest

OPTIMIZER_LR = 1e-3
"""How far the step moves a weight (`trainer_ranks.OPTIMIZER`), at most."""
LAST_DIGIT = 2.4e-7
"""Two units of fp32's last place at most."""
STEP = "tests.trainer.overlap_ranks:step_without_gather"


@pytest.mark.parametrize("model", ["moe_model", "tied_model"])
def test_a_pass_after_a_step_computes_with_its_weights(request, world2, samples, model):
    path = request.getfixturevalue(model)
    found = world2.run(STEP, model=path, samples=samples, layout={})
    before_gather, after_gather = found["passes"]
    assert max(found["differing"]) > 0, "the step gathered by itself, so this shows nothing"
    np.testing.assert_array_equal(before_gather, after_gather)
    gathered_late, gathered_at_once = found["weights"]
    for late, at_once in zip(gathered_late, gathered_at_once, strict=True):
        # the norm of all gradients is summed in another order, which rounds the clipped ones
        np.testing.assert_allclose(late, at_once, rtol=LAST_DIGIT, atol=LAST_DIGIT * OPTIMIZER_LR)
