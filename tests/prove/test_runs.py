"""The recipes of the runs are valid for the GPUs that a machine may have; nothing is started."""

from __future__ import annotations

import pytest

from grpo_megatron.plan.memory import memory_problems, plan_of
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.parts.runs import COLOCATED, DENSE, EXPERTS, FP8, Wanted, recipe_of
from grpo_megatron.prove.random_weights import write_model
from grpo_megatron.prove.workload import WIDE, models
from grpo_megatron.rollout.replica import serve_command

RUNS = {"dense": DENSE, "experts": EXPERTS, "colocated": COLOCATED, "fp8": FP8}


def resolved(tmp_path, wanted: Wanted, conditions: Conditions):
    write_model(tmp_path / "model", models(WIDE)[wanted.model])
    recipe, settings = recipe_of(conditions, wanted, tmp_path)
    return resolve(str(recipe), settings).config


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_the_recipe_breaks_no_rule_and_fits(tmp_path, name, num_gpus):
    conditions = Conditions(device="cuda", num_gpus=num_gpus, capability=(9, 0))
    config = resolved(tmp_path, RUNS[name], conditions)
    assert not memory_problems(config, plan_of(config))
    command, _ = serve_command(config, str(tmp_path / "model"), 0, 1234, token="t")
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.3"
    assert ("--enforce-eager" in RUNS[name].engine_arguments) == (name != "dense")
    shares_a_gpu = config.placement.mode == "colocated" or config.placement.gpus_per_node == 0
    assert shares_a_gpu == (name == "colocated" or num_gpus == 1)


@pytest.mark.parametrize("name", ["dense", "experts", "colocated"])
def test_a_pretended_gpu_is_no_gpu_for_the_engine(tmp_path, name):
    config = resolved(tmp_path, RUNS[name], Conditions(device="pretended", num_gpus=8))
    assert config.placement.gpus_per_node == 0
    assert "--gpu-memory-utilization" not in config.rollout.engine_arguments
