"""Shipped graphs load, their stages fit their GPUs, and every one renders as a Slurm job."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.launch.slurm import render
from grpo_megatron.plan.memory import memory_problems, plan_of
from grpo_megatron.stages.graph import load_graph

GRAPHS = sorted(path.stem for path in (assets.root() / "recipes" / "graphs").glob("*.toml"))


@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name, monkeypatch):
    for key in ("VENV", "PARTITION"):
        monkeypatch.setenv(key, "x")
    graph = load_graph(name)
    first = graph.resolve(graph.order[0]).config.model
    for stage in graph.order:
        resolved = graph.resolve(stage)
        config = resolved.config.model_copy(update={"model": first})  # others are not there yet
        if config.placement.gpus_per_node:
            assert memory_problems(config, plan_of(config, worst_only=True)) == []
        nodes = config.placement.num_nodes
        assert f"#SBATCH --nodes={nodes}\n" in render(resolved, "bare")


def test_every_pipeline_is_there_small_and_large():
    for name in ("r1", "deepseek_v3_2", "deepseek_v4", "open_r1_gsm8k"):
        small, large = (load_graph(graph) for graph in (f"tiny-{name}", name))
        gpus = [
            {g.resolve(s).config.placement.gpus_per_node for s in g.order} for g in (small, large)
        ]
        assert gpus == [{0}, {8}]
        kinds = [{g.kind(s) for s in g.order} for g in (small, large)]
        assert kinds[0] - {"eval"} <= kinds[1] | {"sft"}
