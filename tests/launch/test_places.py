"""What the rules of placement accept, the launcher gives nodes and GPUs of its own."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.rules.placement import PLACEMENT_RULES
from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.steps import SlurmSteps
from grpo_megatron.rollout.replica import gpu_variables
from grpo_megatron.rundir import RunDir
from tests.controller.scored_groups import recipe

BASE = recipe()


@st.composite
def placed_runs(draw) -> RunConfig:
    """Runs on nodes with GPUs, with as many ranks and servers as one may mistake for fitting."""
    gpus = draw(st.integers(1, 8))
    trainer_nodes = draw(st.integers(1, 4))
    rollout_nodes = draw(st.integers(0, 6))
    tensor_parallel = draw(st.integers(1, 2 * gpus))
    data_parallel = draw(st.integers(1, 4))
    num_gpus = (rollout_nodes or trainer_nodes) * gpus
    most_servers = num_gpus // (tensor_parallel * data_parallel)
    assume(most_servers > 0)
    tables = {
        "trainer": {"num_ranks": trainer_nodes * draw(st.integers(1, gpus))},
        "placement": {
            "mode": draw(st.sampled_from(["separate", "colocated"])),
            "trainer_nodes": trainer_nodes,
            "rollout_nodes": rollout_nodes,
            "gpus_per_node": gpus,
        },
        "rollout": {
            "tensor_parallel_size": tensor_parallel,
            "data_parallel_size": data_parallel,
            "num_replicas": draw(st.integers(1, most_servers)),
        },
    }
    changed = {}
    for name, values in tables.items():
        changed[name] = getattr(BASE, name).model_copy(update=values)
    return BASE.model_copy(update=changed)


def gpus_of_servers(config: RunConfig, tmp_path, monkeypatch) -> list[list[tuple[str, int]]]:
    """The GPUs of each server, as its step and its environment say: node and number there."""
    nodes = [f"n{number}" for number in range(config.placement.num_nodes)]
    monkeypatch.setattr("grpo_megatron.launch.steps._components", lambda: [nodes])
    monkeypatch.setattr(SlurmSteps, "check", lambda self: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    steps = SlurmSteps(config, RunDir(tmp_path, "1"))
    of_servers = []
    for index, step in enumerate(steps.replicas()):
        [listed] = [word for word in step.argv if word.startswith("--nodelist=")]
        visible = gpu_variables(config, index).get("CUDA_VISIBLE_DEVICES")
        numbers = list(range(config.placement.gpus_per_node))
        if visible is not None:
            numbers = [int(number) for number in visible.split(",")]
        gpus = []
        for node in listed.removeprefix("--nodelist=").split(","):
            gpus += [(node, number) for number in numbers]
        of_servers.append(gpus)
    return of_servers


@settings(max_examples=300, deadline=None)
@given(placed_runs())
def test_no_two_processes_have_one_gpu(tmp_path_factory, config):
    assume(not list(PLACEMENT_RULES.broken_names(config)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        of_servers = gpus_of_servers(config, tmp_path_factory.getbasetemp(), monkeypatch)
    taken = set()
    if config.placement.mode == "separate":
        ranks_of_node = config.trainer.num_ranks // config.placement.trainer_nodes
        for node in range(config.placement.trainer_nodes):
            taken |= {(f"n{node}", number) for number in range(ranks_of_node)}
    for gpus in of_servers:
        assert len(gpus) == len(set(gpus)) == config.rollout.num_workers
        assert not taken.intersection(gpus)
        taken.update(gpus)


def test_engines_are_on_the_gpus_that_the_trainer_leaves(tmp_path, monkeypatch):
    config = recipe(
        trainer={"num_ranks": 4},
        placement={"trainer_nodes": 2, "gpus_per_node": 4},
        rollout={"tensor_parallel_size": 2, "num_replicas": 2},
    )
    assert gpus_of_servers(config, tmp_path, monkeypatch) == [
        [("n0", 2), ("n0", 3)],
        [("n1", 2), ("n1", 3)],
    ]
