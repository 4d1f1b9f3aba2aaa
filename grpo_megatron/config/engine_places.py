"""Which nodes and GPUs a rollout server gets: rules count places, the launcher hands them out.

Engines fill nodes one by one, on GPUs that the trainer leaves free. A server that is wider than a
node takes whole nodes, which must be nodes without trainer ranks, or shared in turns."""

from dataclasses import dataclass

from grpo_megatron.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where a server runs."""

    nodes: range
    """Numbers of its nodes among those that generate; the first one answers."""
    gpus: range
    """Numbers of its GPUs on each of these nodes; empty on a CPU."""


def gpus_for_engines(run: RunConfig) -> range:
    """Return the numbers of the GPUs that engines may have on every node that generates."""
    placement = run.placement
    first = 0
    if placement.mode == "separate" and placement.rollout_nodes == 0:
        first = run.trainer.num_ranks // placement.trainer_nodes
    return range(first, max(placement.gpus_per_node, first))


def most_ranks_of_node(run: RunConfig) -> int:
    """Return how many trainer ranks each of the trainer's nodes has GPUs for beside the engines of
    the run; 0: none."""
    placement = run.placement
    gpus = placement.gpus_per_node
    if placement.mode == "colocated" or placement.rollout_nodes > 0:
        return gpus
    servers = -(-run.num_replicas // placement.trainer_nodes)
    return max(gpus - servers * run.rollout.num_workers, 0)


def room_for_engines(run: RunConfig) -> int:
    """Count the servers that nodes with GPUs have places for."""
    size = run.rollout.num_workers
    gpus = run.placement.gpus_per_node
    free = len(gpus_for_engines(run))
    nodes = _num_nodes(run)
    if size <= free:
        return nodes * (free // size)
    if free < gpus:  # a node with trainer ranks cannot be taken whole
        return 0
    return nodes // _nodes_of_one(run)


def place_of_engine(run: RunConfig, index: int) -> EnginePlace:
    """Return the place of server `index` of a run whose servers have room: no other server and no
    rank of a separate trainer has a GPU of it."""
    first_node = index * _num_nodes(run) // run.rollout.num_replicas
    nodes = range(first_node, first_node + _nodes_of_one(run))
    size = run.rollout.num_workers
    gpus = gpus_for_engines(run)
    if size >= len(gpus):
        return EnginePlace(nodes, gpus)
    first_gpu = index % (len(gpus) // size) * size
    return EnginePlace(nodes, gpus[first_gpu : first_gpu + size])


def _num_nodes(run: RunConfig) -> int:
    """Count the nodes that generate: the trainer's where there are no others."""
    return run.placement.rollout_nodes or run.placement.trainer_nodes


def _nodes_of_one(run: RunConfig) -> int:
    """Count the nodes of a server; on a CPU it has one."""
    gpus = run.placement.gpus_per_node
    if not gpus:
        return 1
    return -(-run.rollout.num_workers // gpus)
