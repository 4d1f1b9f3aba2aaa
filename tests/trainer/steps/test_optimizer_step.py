"""Steps at their edges: empty micro-batches, numbers that are none, the learning rate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grpo_megatron.config.trainer import OptimizerConfig
from tests.trainer.test_layout_parity import TOLERANCE, assert_same

CASES = "tests.trainer.trainer_ranks:"
SPARSE = {  # with fewer samples than micro-batches
    "dp2": (2, {}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "dp2_tp2": (4, {"tensor_parallel_size": 2}),
    "dp4": (4, {}),
}


@pytest.mark.engine
@pytest.mark.parametrize("layout", SPARSE)
def test_ranks_without_samples_change_nothing(request, world1, moe_model, samples, layout):
    rows = np.array([3])
    expected = world1.run(
        CASES + "train_rows", model=moe_model, samples=samples, layout={}, rows=rows
    )
    size, parallel = SPARSE[layout]
    found = request.getfixturevalue(f"world{size}").run(
        CASES + "train_rows", model=moe_model, samples=samples, layout=parallel, rows=rows
    )
    assert_same(found, expected, TOLERANCE * 10)  # after three steps
    assert np.isfinite(found["norms"]).all() and min(found["norms"]) > 0


@pytest.mark.engine
@pytest.mark.parametrize("world", ["world1", "world2"])
@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
def test_a_loss_that_is_no_number_is_refused_on_every_rank(
    request, moe_model, samples, world, kind
):
    """Also where only the last rank met it; weights are as before when it was the loss."""
    messages, is_unchanged = request.getfixturevalue(world).run(
        CASES + "not_a_number", model=moe_model, samples=samples, kind=kind
    )
    what = {
        "nan": "TrainerError: the loss is nan",
        "inf": "TrainerError: the loss is -inf",
        "gradient": "TrainerError: the gradient norm is nan",
    }[kind]
    assert all(message.startswith(what) for message in messages), messages
    assert is_unchanged or kind == "gradient"


def config(**settings) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1} | settings)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate(schedule):
    settings = config(schedule=schedule, warmup_steps=4)
    rates = [settings.rate(step, 24) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    middle, end = {"constant": (1.0, 1.0), "linear": (0.55, 0.1), "cosine": (0.55, 0.1)}[schedule]
    assert rates[14] == pytest.approx(middle) and rates[24] == pytest.approx(end)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert settings.rate(1000, 24) == pytest.approx(end)
    if schedule == "cosine":
        assert rates[9] == pytest.approx(0.1 + 0.9 * (2 + 2**0.5) / 4)


def test_learning_rate_without_warm_up_starts_at_the_peak():
    for schedule in ("constant", "linear", "cosine"):
        assert config(schedule=schedule).rate(0, 10) == 1.0
        assert config(schedule=schedule, warmup_steps=3).rate(1, 2) == 2 / 3
