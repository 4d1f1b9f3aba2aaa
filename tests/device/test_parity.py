"""On a CUDA device that only pretends, the trainer computes what it computes on the CPU.

The ranks run the CUDA branch of everything, with collectives of NCCL over gloo; a tensor that was
forgotten on the host, or numpy of one that was not, ends a case with an error. Which kernels a GPU
would compute with is another matter: docs/pretended-device.md.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.device

UPDATE = "tests.device.device_ranks:rl_update"
GRPO = {"objective": {"preset": "grpo"}, "routing": {}}
TOLERANCE = 1e-6
LAYOUTS_2 = {
    "tp2_sp": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "ep2": {"expert_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


def assert_same(found: dict, expected: dict) -> None:
    """Two reports of three steps each."""
    assert len(expected["losses"]) == len(expected["grad_norms"]) == 3
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["grad_norms"], expected["grad_norms"], rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["moe", "dense", "latent"])
def test_one_rank(request, pretended1, world1, three_updates, kind):
    model = request.getfixturevalue(f"small_{kind}_model")
    arguments = {"model": model, "samples": three_updates, "layout": {}, **GRPO}
    found = pretended1.run(UPDATE, **arguments)
    assert_same(found.report, world1.run(UPDATE, **arguments).report)


@pytest.mark.parametrize("layout", LAYOUTS_2)
def test_two_ranks(pretended2, world2, small_moe_model, three_updates, layout):
    arguments = {
        "model": small_moe_model,
        "samples": three_updates,
        "layout": LAYOUTS_2[layout],
        **GRPO,
    }
    found = pretended2.run(UPDATE, **arguments)
    assert_same(found.report, world2.run(UPDATE, **arguments).report)
