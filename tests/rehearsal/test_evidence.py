"""What counts as shown by the metrics of a rehearsed run."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rehearsal.evidence import at_cluster_scale, cold_started, of_run, rewarded
from grpo_megatron.rehearsal.rehearse import write_site
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event

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


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_run_may_be_a_cold_start_alone(tmp_path, num_steps):
    run_dir = RunDir(tmp_path)
    append_event(run_dir.events, "started", role="controller")
    if num_steps:
        append_event(run_dir.events, "cold_start_done", steps=num_steps, accuracy=0.5)
    finding = cold_started(run_dir)
    assert finding.holds == (num_steps > 0)
    assert finding.detail == f"{num_steps} optimizer steps"


def test_preferences_fit_without_the_cache_of_an_engine(tmp_path):
    small = ['rollout.engine_arguments=["--gpu-memory-utilization=0.1"]']
    site = write_site(tmp_path / "site.env")
    [fits] = [
        finding
        for finding in at_cluster_scale(resolve("stages/tulu3-8b-preferences", small), site)
        if finding.what == "its memory fits by the plan"
    ]
    assert fits.holds


@pytest.mark.parametrize(
    ("values", "holds", "told"),
    [
        ({"prompts": 8.0, "accuracy": 0.5}, True, "accuracy 0.500"),
        (
            {"prompts": 8.0, "accuracy": 0.5, "accuracy_unscorable": 2.0},
            True,
            "accuracy 0.500 (2 of 8 prompts could not be scored)",
        ),
        (
            {"prompts": 8.0, "accuracy_unscorable": 8.0},
            False,
            "accuracy unknown (unreliable: 8 of 8 prompts could not be scored)",
        ),
    ],
)
def test_held_out_prompts_are_evaluated_where_some_could_be_scored(tmp_path, values, holds, told):
    run_dir = RunDir(tmp_path)
    run_dir.result.write_text(json.dumps({"eval": {"all": values}}))
    config = recipe().model_copy(update={"kind": "eval"})
    [finding] = of_run(config, run_dir, num_attempts=1)
    assert (finding.holds, finding.detail) == (holds, told)
