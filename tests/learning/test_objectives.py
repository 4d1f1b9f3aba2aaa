"""Objectives of the family learn the demo's task, in fewer steps than the demo has."""

from __future__ import annotations

import pytest

from tests.learning.test_demo import accuracies

pytestmark = pytest.mark.learning


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "rloo", "cispo", "deepseek_v3_2"])
def test_objectives_learn(tmp_path, preset):
    dynamic = ["sampling.dynamic=true"] if preset == "dapo" else []
    before, after = accuracies(f"runs_dir={tmp_path}", f"objective.preset={preset}",
                               "num_steps=130", *dynamic)
    assert after - before >= 0.2
