"""What `plan` counts where prompts have different numbers of samples."""

from __future__ import annotations

import pytest

from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.resolve import resolve

SIZES = [  # 64 prompts of 8 samples on average, two data-parallel ranks, 256 samples a micro-batch
    ([], 512, 512),
    (["batch.updates_per_rollout=4"], 512, 128),
    (["batch.updates_per_rollout=3"], 512, 176),  # 21, 21 and 22 whole groups
    (["allocation={}"], 512, 512),
    # 16 prompts: at most 16 samples each, and the other 48 have at least 4
    (["batch.updates_per_rollout=4", "allocation={}"], 512, 256),
    (["batch.updates_per_rollout=4", "allocation={max_samples_per_prompt=9}"], 512, 144),
    (["batch.updates_per_rollout=2", "allocation={base_samples_per_prompt=7}"], 512, 288),
    # of all that is drawn the largest groups may be kept
    (["allocation={}", "sampling.dynamic=true"], 1024, 1024),
]


@pytest.mark.parametrize(("overrides", "of_step", "of_update"), SIZES)
def test_the_worst_case_of_a_step_and_of_an_update(overrides, of_step, of_update):
    tight = ["trainer.max_tokens_per_microbatch=64"]  # a sample each
    config = resolve("demo/gspo-moe-cpu", [*overrides, *tight]).config
    numbers = plan_of(config).numbers
    assert numbers["tokens_per_step"] == of_step * 64
    assert numbers["microbatches_per_update"] == of_update // config.trainer.dp
