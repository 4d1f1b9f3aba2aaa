"""The whole RL update on a pretended GPU: equal to the plain one, and how often its host waits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.device.test_parity import TOLERANCE
from tests.trainer.models import MOE, write_samples

pytestmark = [pytest.mark.device, pytest.mark.timeout(400)]

UPDATE = "tests.device.device_ranks:rl_update"
V3_2 = {"preset": "deepseek_v3_2", "kl_beta": 0.05}
R3 = {"replay": "r3"}


@pytest.fixture(scope="session")
def stale_samples(tmp_path_factory) -> str:
    """With routes, of two domains, by an older policy, for three optimizer steps."""
    directory = tmp_path_factory.mktemp("store") / "step_000001"
    return write_samples(directory, num_updates=3, num_domains=2, stale=True, hf=MOE)


@pytest.fixture(scope="session")
def arguments(moe_model, stale_samples):
    return {
        "model": moe_model,
        "samples": stale_samples,
        "layout": {},
        "objective": V3_2,
        "routing": R3,
    }


@pytest.fixture(scope="session")
def found(pretended1, arguments):
    return pretended1.run(UPDATE, **arguments)


def test_it_computes_what_the_cpu_does(world1, arguments, found):
    expected = world1.run(UPDATE, **arguments)
    assert found.num_microbatches == expected.num_microbatches > 3
    for name in ("losses", "grad_norms"):
        np.testing.assert_allclose(found.report[name], expected.report[name], TOLERANCE, TOLERANCE)
    metrics = expected.report["metrics"]
    assert found.report["metrics"].keys() == metrics.keys()
    for name, value in metrics.items():
        assert found.report["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
