"""A whole run with allocation, seeding and sharpening."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.recipes]


def test_seeded_prompts_and_groups_of_different_sizes_are_trained(tmp_path):
    done = runs.command(
        "train",
        runs.RECIPE,
        f"runs_dir={tmp_path}",
        "num_steps=4",
        "objective.preset=xrpo",
        "domains.0.template={question}",
        "domains.0.accuracy_threshold=0.4",
        "batch.updates_per_rollout=2",
        "allocation={base_samples_per_prompt=2, bonus=0.3}",
        "seeding.exemplar=Q {question} A {answer} ",
        "seeding.question=Q {question} A",
        "rollout.max_model_len=160",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "short"
    records = runs.metrics(run)
    assert [record["batch/num_samples"] for record in records] == [32] * 4
    assert any(
        record["allocation/group_size_max"] > record["allocation/group_size_min"]
        for record in records
    )
    assert records[0]["seeding/prompts"] == 0
    assert sum(record["seeding/prompts"] for record in records) > 0
    # what was sampled on a seeded prompt is trained on it
    assert all(record["mismatch/abs_max"] < 1e-4 for record in records)
    num_contexts = 0
    for record in records:
        table = SampleTable(run / "store" / f"step_{record['step']:06d}")
        assert np.bincount(table.group).max() == record["allocation/group_size_max"]
        lengths = table.prompt_lengths
        for number in range(8):
            num_contexts += len(set(lengths[table.group == number].tolist())) - 1
    assert num_contexts == sum(record["seeding/prompts"] for record in records)
    manifest = json.loads((run / "store" / "step_000003" / "manifest.json").read_text())
    assert manifest["sampler"]["exemplars"]
