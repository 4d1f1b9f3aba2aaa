"""Each rule between keys, broken once, and the shipped recipe, which breaks none."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from grpo_megatron.config import constraints, problems
from grpo_megatron.config.constraints import (
    OBJECTIVE_AND_BATCH,
    WITHIN_OBJECTIVE,
    check_constraints,
)
from grpo_megatron.plan import layout, memory, resolve
from tests.config.conftest import unchecked_config

DISTIL = ["kind=distil", "cold_start=null"]


@pytest.mark.parametrize(("rule", "overrides"), [
    ("model_source", ["model.path=/x"]),
    ("model_source", ["model.preset=null"]),
    ("model_preset", ["model.preset=other"]),
    ("domain_names", ['domains=[{name="a", source="file", path="x", rewards=[{function="m:f"}]},'
                      '{name="a", source="file", path="x", rewards=[{function="m:f"}]}]']),
    ("domain_source", ["domains.0.dataset=null"]),
    ("domain_source", ["domains.0.path=x.jsonl"]),
    ("template", ["domains.0.template={question"]),
    ("template", ["domains.0.template={question} {answer}"]),
    ("reward_function", ["domains.0.rewards.0.function=exact_match"]),
    ("problem_counts", ["domains.0.num_problems=1536"]),
    ("group_size", ["batch.num_samples_per_prompt=1"]),
    ("objective", ["objective.kl_beta=0.1"]),
    ("objective", ["domains.0.objective.kl_beta=0.1"]),
    ("objective", ["objective.preset=two_grpo"]),
    ("objective", ["objective.preset=gagpo"]),
    ("objective", ["objective.preset=gfpo", "objective.subset_size=20"]),
    ("objective", ["objective.llds_weight=0.1"]),
    ("updates_per_rollout", ["batch.num_prompts=4", "batch.updates_per_rollout=5"]),
    ("completion_length", ["rollout.max_new_tokens=64"]),
    ("length_budget", ["domains.0.max_new_tokens=7"]),
    ("accuracy_component", ["domains.0.accuracy=exact_matc"]),
    ("accuracy_component", ["domains.0.accuracy=zzz"]),
    ("zero_variance_resample", ["sampling.zero_variance=resample"]),
    ("deterministic_surplus", ["sampling.surplus_staleness=1", "rollout.deterministic=true"]),
    ("microbatch_length", ["trainer.max_tokens_per_microbatch=63"]),
    ("deterministic_staleness", ["batch.max_staleness=1", "rollout.deterministic=true"]),
    ("pause_in_flight", ["publish.pause=keep"]),
    ("num_senders", ["publish.num_senders=3"]),
    ("canary_tolerance", ["rollout.dtype=bfloat16", "publish.canary_tolerance=0.001"]),
    ("validation_prompts", ["data.num_validation=0"]),
    ("validation_prompts", ["data.num_validation=0", "cold_start=null", "evaluation.interval=5"]),
    ("placement", ["placement.trainer_nodes=3"]),
    ("placement", ["placement.gpus_per_node=1", "placement.rollout_nodes=1"]),
    ("placement", ["placement.gpus_per_node=2"]),
    ("placement", ["placement.gpus_per_node=2", "placement.rollout_nodes=1",
                   "rollout.num_replicas=3"]),
    ("placement", ["placement.gpus_per_node=2", "placement.rollout_nodes=3",
                   "rollout.tensor_parallel_size=4", "rollout.num_replicas=2"]),
    ("min_lr", ["optimizer.min_lr=1"]),
    ("min_lr", ["cold_start.optimizer.min_lr=1"]),
    ("rl_only", ["kind=sft"]),
    ("rl_only", ["kind=sft", "cold_start=null", "correction={probability=0.5}"]),
    ("distillation", ["kind=distil", "cold_start=null"]),
    ("teacher_domains", [*DISTIL, 'distillation={teachers=[{path="t"}, '
                                  '{path="u", domains=["sums"]}]}']),
    ("sampled_tokens", [*DISTIL, 'distillation={teachers=[{path="t"}], mode="sampled", '
                                 'samples="dataset"}']),
    ("sampled_tokens", [*DISTIL, 'distillation={teachers=[{path="t"}], mode="sampled", '
                                 'temperature=0.5}']),
    ("teacher_source", [*DISTIL, 'distillation={teachers=[{}]}']),
    ("teacher_source", [*DISTIL, 'distillation={mode="topk_tail", '
                                 'teachers=[{path="t", url="http://u"}]}']),
    ("served_teacher", [*DISTIL, 'distillation={teachers=[{url="http://u"}]}']),
    ("served_teacher", [*DISTIL, 'distillation={mode="topk_tail", teachers=[{url="http://u"}], '
                                 'temperature=0.5}']),
    ("served_teacher", [*DISTIL, 'distillation={mode="topk_tail", teachers=[{url="http://u"}]}',
                        "rollout.temperature=0.5"]),
    ("colocated_staleness", ['placement.shared_servers=["http://judge:8000"]',
                             "batch.max_staleness=1"]),
    ("token_routing", ["kind=sft", "cold_start=null", "routing.replay=r3"]),
    ("token_routing", [*DISTIL, 'distillation={teachers=[{path="t"}]}', "routing.replay=r2"]),
    ("gate", ['gates=["eval.additoin.accuracy >= 0.5"]']),
    ("untaught_domain", [*DISTIL, 'distillation={teachers=[{path="t", domains=["b"]}]}',
                         'domains=[{name="a", source="file", path="x", rewards=[{function="m:f"}]},'
                         '{name="b", source="file", path="x", rewards=[{function="m:f"}]}]']),
])
def test_each_rule(rule, overrides):
    violations = check_constraints(unchecked_config(*overrides))
    assert [violation.rule for violation in violations] == [rule]
    assert all(violation.remedy or violation.nearest for violation in violations)


def test_every_rule_has_its_text_and_every_text_its_rule():
    named = {*constraints._OF_RUN, *constraints._OF_DOMAIN, *WITHIN_OBJECTIVE,
             *OBJECTIVE_AND_BATCH, *layout.TRAINER_RULES, *layout.ROLLOUT_RULES,
             *resolve._RULES, *memory.RULES}
    texts = tomllib.loads(Path(problems.__file__).with_name("rules.toml").read_text())
    assert named == {name if "key" in table else f"{name}.{variant}"
                     for name, table in texts.items()
                     for variant in (table if "key" not in table else [""])}


@pytest.mark.parametrize("overrides", [
    [], ["batch.num_prompts=4", "batch.updates_per_rollout=4"], ["batch.max_staleness=1"],
    ["batch.max_staleness=1", "publish.pause=abort"],
    ["rollout.deterministic=true"], ["rollout.max_new_tokens=63"],
    ["trainer.max_tokens_per_microbatch=64"], ["domains.0.num_problems=1537"],
    ["domains.0.num_problems=null"], ["data.num_validation=0", "cold_start=null"],
    ["rollout.dtype=bfloat16", "publish.canary_tolerance=0.1"],
    ["rollout.dtype=bfloat16", "publish.canary=false"],
    ["batch.num_samples_per_prompt=1", "num_steps=0"], ["publish.num_senders=2"],
    ["model.preset=qwen3-8b", "model.path=/x"], ["placement.gpus_per_node=3"],
    ["placement.gpus_per_node=2", "placement.mode=colocated", "rollout.num_replicas=2"],
    ["placement.gpus_per_node=2", "placement.rollout_nodes=4", "rollout.tensor_parallel_size=4",
     "rollout.num_replicas=2"],
    ["domains.0.template={{}} {metadata[expression]} ="], ["domains.0.max_new_tokens=6"],
    ["domains.0.accuracy=exact_match", "sampling.dynamic=true", "curriculum.floor=0.1"],
])
def test_valid_settings(overrides):
    assert check_constraints(unchecked_config(*overrides)) == []
