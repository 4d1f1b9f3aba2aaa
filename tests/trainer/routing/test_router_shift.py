"""How far routers have shifted since the old policy's pass, at every layout."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.models import MOE, write_samples

pytestmark = pytest.mark.engine
CASE = "tests.trainer.routing_ranks:router_shift"
LAYOUTS = [
    ("world2", {"pipeline_parallel_size": 2}),
    ("world2", {"tensor_parallel_size": 2}),
    pytest.param("world2", {"context_parallel_size": 2}, marks=pytest.mark.matrix),
    pytest.param("world2", {"expert_parallel_size": 2}, marks=pytest.mark.matrix),
    pytest.param(
        "world4",
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        marks=pytest.mark.matrix,
    ),
    pytest.param(
        "world4",
        {"tensor_parallel_size": 2, "context_parallel_size": 2},
        marks=pytest.mark.matrix,
    ),
]


@pytest.fixture(scope="module")
def routed_samples(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", num_updates=2, hf=MOE)


@pytest.fixture(scope="module")
def one_rank(world1, moe_model, routed_samples):
    return world1.run(CASE, model=moe_model, samples=routed_samples, layout={}, replay="r3")


def test_it_is_the_mean_over_experts_and_layers_where_the_token_is_predicted(one_rank):
    """Against the routers' whole distributions, recorded in two passes."""
    assert one_rank["shift"].min() > 0.1 and one_rank["shift"].max() < 0.999
    np.testing.assert_allclose(one_rank["shift"], one_rank["expected"], rtol=1e-5)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_every_layout_finds_the_same(request, moe_model, routed_samples, one_rank, size, layout):
    world = request.getfixturevalue(size)
    found = world.run(CASE, model=moe_model, samples=routed_samples, layout=layout, replay="r3")
    np.testing.assert_allclose(found["shift"], one_rank["shift"], rtol=1e-4)
