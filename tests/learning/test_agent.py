"""The agent of the demo learns to call its calculator; with shuffled advantages it does not."""

from __future__ import annotations

import pytest

from tests.e2e import runs
from tests.learning.test_demo import accuracies_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1300)]
DEMO = "demo/agent-calculator-cpu"


def accuracies(*arguments: str) -> tuple[float, float]:
    return accuracies_of(runs.command("train", DEMO, *arguments, timeout_s=1200))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_agent_learns(tmp_path, seed):
    before, after = accuracies(f"runs_dir={tmp_path}", f"seed={seed}")
    assert before <= 0.4
    assert after >= 0.75


def test_shuffled_advantages_do_not_learn(tmp_path):
    before, after = accuracies(f"runs_dir={tmp_path}", "objective.shuffle_advantages=true")
    assert after <= before + 0.10
