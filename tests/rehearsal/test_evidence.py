"""What counts as shown by the metrics of a rehearsed run."""

from __future__ import annotations

import pytest

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rehearsal.evidence import rewarded

COUNTED = {"batch/empty_responses@sums": 0.0, "batch/empty_responses@poems": 0.0}
"""Of every domain of the recipe, also where none of its prompts was drawn."""


def recipe() -> RunConfig:
    domains = []
    for name, reward in (("sums", "right"), ("poems", "judge")):
        rewards = [{"function": "a:b", "name": reward}]
        domains.append({"name": name, "source": "file", "path": "x", "rewards": rewards})
    return RunConfig.model_validate(
        {"name": "case", "model": {"preset": "tiny-qwen3-moe"}, "domains": domains}
    )


@pytest.mark.parametrize(
    ("record", "missing"),
    [
        ({"policy/entropy@sums": 1.0, "reward/right/mean": 0.5}, ""),  # poems were not drawn
        ({"policy/entropy@sums": 1.0}, "right"),
        (
            {
                "policy/entropy@sums": 1.0,
                "policy/entropy@poems": 1.0,
                "reward/right/mean": 0.5,
            },
            "judge",
        ),
    ],
)
def test_rewards_of_domains_that_were_trained_have_scores(record, missing):
    finding = rewarded(recipe(), [COUNTED | record])
    assert finding.holds == (not missing)
    if missing:
        assert finding.detail == f"no score of {missing}"
