"""What is measured by passes of its own: KL to a reference without weight, the step's effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.drift_file import read_drift
from grpo_megatron.batching.store import SampleTable

pytestmark = pytest.mark.engine
OBJECTIVES = {
    "measured": {"preset": "deepseek_v3_2", "monitor_share": 1},
    "on some": {"preset": "deepseek_v3_2", "monitor_share": 0.2},
    "not at all": {"preset": "deepseek_v3_2", "monitor_share": 0},
    "weighed": {"preset": "deepseek_v3_2", "kl_beta": 1e-12},
    "no estimator": {"preset": "gspo", "monitor_share": 1},
}
NAMES = [f"reference/{kind}{domain}" for kind in ("k1", "k3") for domain in ("", "@even", "@odd")]


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}], ids=["w1", "pp2"])
def test_a_reference_without_weight_is_measured(request, moe_model, samples_of_two, layout):
    world = request.getfixturevalue("world2" if layout else "world1")
    found = world.run(
        "tests.trainer.trainer_ranks:train_objectives",
        model=moe_model,
        samples=samples_of_two,
        layout=layout,
        objectives=OBJECTIVES,
    )
    metrics = {name: report["metrics"] for name, report in found.items()}
    for name in NAMES:
        assert metrics["measured"][name] == pytest.approx(metrics["weighed"][name], rel=1e-5)
        assert found["measured"]["normalisers"][name] == "tokens"
        assert name not in metrics["not at all"] and name not in metrics["no estimator"]
    assert 0 < metrics["on some"]["reference/k3"] != metrics["measured"]["reference/k3"]
    assert found["measured"]["losses"] == found["not at all"]["losses"]
    for name in ("measured", "no estimator"):
        gains = [metrics[name][f"step/logprob_gain_{sign}"] for sign in ("positive", "negative")]
        assert gains[0] > 0 > gains[1] and metrics[name]["step/k2"] > 0
        assert metrics[name]["update/k2"] == 0  # the only update starts from the old policy
    assert not any(name.startswith("step/") for name in metrics["not at all"])
    require_recorded(Path(samples_of_two), metrics["no estimator"])  # the last one that was trained


def require_recorded(directory: Path, metrics: dict[str, float]) -> None:
    """Log-probs before and after the step are in the store: they give its metrics again."""
    lengths = SampleTable(directory).completion_lengths
    found = read_drift(directory, lengths)
    assert list(found) == list(range(len(lengths)))
    gains = np.concatenate([sample.after - sample.before for sample in found.values()])
    advantages = np.concatenate([sample.advantages for sample in found.values()])
    for sign, is_of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
        wanted = metrics[f"step/logprob_gain_{sign}"]
        assert gains[is_of_sign].mean() == pytest.approx(wanted, rel=1e-4)


@pytest.fixture(scope="module")
def samples_of_two(tmp_path_factory):
    from tests.trainer.models import write_samples

    return write_samples(tmp_path_factory.mktemp("store") / "step_000001", num_domains=2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_moving_average_follows_by_steps_that_its_dtype_cannot_tell_apart(
    world1, moe_model, precision
):
    found = world1.run(
        "tests.trainer.trainer_ranks:moving_average",
        model=moe_model,
        precision=precision,
        ema=0.99,
        times=200,
    )
    wanted = found["after"] + 0.99**200 * (found["before"] - found["after"])
    leap = np.abs(found["after"] - found["before"]).mean()
    assert leap > 0
    assert np.abs(found["reference"] - wanted).mean() < 0.1 * leap
