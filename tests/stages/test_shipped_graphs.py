"""Shipped graphs load, their stages fit their GPUs, and every one renders as a Slurm job."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.launch.slurm import render
from grpo_megatron.plan.memory import memory_problems, plan_of
from grpo_megatron.stages.loading import load_graph

GRAPHS = sorted(path.stem for path in (assets.root() / "recipes" / "graphs").glob("*.toml"))


ONLY_SMALL = {"tulu3": ("rejection_sample",)}
"""Kinds that a small graph has because its data are not downloaded."""


def root_of(graph, stage: str) -> str:
    """The stage whose own model the checkpoint of `stage` descends from."""
    parent = graph.table.stages[stage].inputs.get("model.path")
    if parent is None:
        return stage
    return root_of(graph, parent)


@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name, monkeypatch):
    for key in ("VENV", "PARTITION"):
        monkeypatch.setenv(key, "x")
    graph = load_graph(name)
    for stage in graph.order:
        resolved = graph.resolve(stage)
        first = graph.resolve(root_of(graph, stage)).config.model  # others are not there yet
        config = resolved.config.model_copy(update={"model": first})
        if config.placement.gpus_per_node:
            assert memory_problems(config, plan_of(config, worst_only=True)) == []
        nodes = config.placement.num_nodes
        assert f"#SBATCH --nodes={nodes}\n" in render(resolved, "bare")


def test_every_pipeline_is_there_small_and_large():
    names = ("r1", "deepseek_v3_2", "deepseek_v4", "domain_experts", "agents")
    for name in (*names, "open_r1_gsm8k", "tulu3"):
        small, large = (load_graph(graph) for graph in (f"tiny-{name}", name))
        gpus = [
            {g.resolve(s).config.placement.gpus_per_node for s in g.order} for g in (small, large)
        ]
        assert gpus == [{0}, {8}]
        kinds = [{g.kind(s) for s in g.order} for g in (small, large)]
        assert kinds[0] - {"eval", *ONLY_SMALL.get(name, ())} <= kinds[1] | {"sft"}


def test_rl_stages_of_r1_reward_form_and_one_language():
    for name in ("r1", "tiny-r1"):
        graph = load_graph(name)
        for stage in graph.order:
            if graph.kind(stage) == "rl":
                for domain in graph.resolve(stage).config.domains:
                    components = [reward.component for reward in domain.rewards]
                    assert {"format_think", "language_consistency"} <= set(components)
                    assert "<think>" in domain.template


def test_the_merged_stage_of_deepseek_v3_2_has_every_part():
    config = load_graph("deepseek_v3_2").resolve("merged").config
    assert config.batch.max_staleness >= 1 and config.batch.updates_per_rollout > 1
    assert config.objective.off_policy_mask == "opsm" and config.objective.kl == "is_k3"
    assert config.routing.replay == "r3" and config.rollout.top_p < 1
    rewards = {domain.name: domain.rewards for domain in config.domains}
    for name in ("math", "code"):
        components = {reward.component for reward in rewards[name]}
        assert {"length_penalty", "language_consistency"} < components
    for name in ("writing", "general"):
        assert rewards[name][0].arguments["criteria_field"] == "rubric"


def test_r1_teaches_a_model_of_another_family_by_its_own_template():
    graph = load_graph("r1_distill")
    samples = graph.resolve("samples").config
    student = graph.resolve("student").config
    assert (samples.model.preset, student.model.preset) == ("deepseek-r1", "qwen2.5-7b")
    assert {domain.template for domain in (*samples.domains, *student.domains)} == {"chat"}
    assert student.rollout.max_model_len >= samples.rollout.max_model_len


@pytest.mark.parametrize("name", ["agents", "tiny-agents"])
def test_every_agent_is_taught_by_the_expert_of_its_domain(name):
    graph = load_graph(name)
    inputs = graph.table.stages["distilled"].inputs
    student = graph.resolve("distilled").config
    for number, teacher in enumerate(student.distillation.teachers):
        expert = inputs[f"distillation.teachers.{number}.path"]
        weights = {domain.name: domain.weight for domain in graph.resolve(expert).config.domains}
        taught = [domain for domain, weight in weights.items() if weight > 0]
        assert taught == list(teacher.domains) == [expert]
    assert {domain.environment.name for domain in student.domains} == {
        "calculator",
        "python",
        "search",
    }
