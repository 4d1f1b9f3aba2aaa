"""Optimizer steps without a sample in the loss: advantages are made of their tokens, too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.models import write_samples

pytestmark = pytest.mark.engine
CASES = "tests.trainer.trainer_ranks:"
OBJECTIVES = {
    "reference and old log-probs": {
        "preset": "reinforce_pp",
        "advantage": "reward",
        "whiten": "tokens",
        "kl": "reward_k1",
        "kl_beta": 0.5,
        "overlong": "loss",
    },
    "entropies": {"preset": "gtpo_entropy", "whiten": "tokens", "overlong": "loss"},
    "values": {"preset": "ppo", "overlong": "loss"},
    "no columns": {"preset": "grpo", "whiten": "samples", "overlong": "loss"},
}
NUM_GROUPS = 6
CUT_GROUPS = (2, 3)
"""The second one of three updates."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`train(world, model, num_updates, layout)`: reports of the same samples by objective."""

    def train(world, model: str, num_updates: int, layout: dict) -> dict[str, dict]:
        samples = write_samples(
            tmp_path_factory.mktemp("store") / "step_000001",
            num_groups=NUM_GROUPS,
            num_updates=num_updates,
            num_domains=2,
            cut_groups=CUT_GROUPS,
        )
        return world.run(
            CASES + "train_objectives",
            model=model,
            samples=samples,
            objectives=OBJECTIVES,
            layout=layout,
        )

    return train


@pytest.fixture(scope="module")
def skipping(world1, moe_model, trained) -> dict[str, dict]:
    return trained(world1, moe_model, 3, {})


def test_advantages_do_not_depend_on_the_number_of_updates(world1, moe_model, trained, skipping):
    whole = trained(world1, moe_model, 1, {})
    for name, report in skipping.items():
        assert report["updates"] == len(report["losses"]) == 2
        assert report["metrics"]["batch/skipped_updates"] == 1
        expected = whole[name]["metrics"]
        assert expected["batch/skipped_updates"] == 0
        for measure in ("mean", "std", "zero_fraction"):  # of the whole batch
            for scope in ("", "@even", "@odd"):
                key = f"advantage/{measure}{scope}"
                np.testing.assert_allclose(
                    report["metrics"][key],
                    expected[key],
                    rtol=1e-4,
                    atol=1e-6,
                    err_msg=f"{name} {key}",
                )


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.matrix),
    ],
    ids=["data", "pipeline", "tensor", "context"],
)
def test_layouts_agree(world2, moe_model, trained, skipping, layout):
    found = trained(world2, moe_model, 3, layout)
    for name, expected in skipping.items():
        assert found[name]["updates"] == 2
        for key in ("losses", "grad_norms"):
            np.testing.assert_allclose(
                found[name][key], expected[key], rtol=2e-4, atol=1e-6, err_msg=f"{name} {key}"
            )
