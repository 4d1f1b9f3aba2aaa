"""How nodes are best split between training and generation."""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_megatron.config.engine_places import room_for_engines
from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.engine_rules import ENGINE_RULES
from grpo_megatron.plan.memory import Plan, offloads_optimizer, plan_of
from grpo_megatron.plan.model_facts import model_facts
from grpo_megatron.plan.rank_bytes import bytes_per_parameter
from grpo_megatron.plan.search import fitting, settings_of
from grpo_megatron.plan.timing.constants import Constants
from grpo_megatron.plan.timing.lengths import Lengths
from grpo_megatron.plan.timing.prediction import Prediction, predict_run
from grpo_megatron.plan.weights import ELEMENT_BYTES

_EVEN_SPLITS = 8
"""Of more nodes, so many splits are tried beside those of powers of two."""


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes that train and nodes that generate, with the fastest layouts of both."""

    trainer_nodes: int
    rollout_nodes: int
    settings: str
    """Overrides of the recipe."""
    prediction: Prediction


def splits_nodes(config: RunConfig) -> bool:
    """Say whether a recipe has nodes of either kind: it generates and trains, on GPUs apart."""
    has_both = config.trains and not config.uses_dataset
    return has_both and config.placement.mode == "separate"


def node_splits(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    device: str,
    constants: Constants,
    lengths: Lengths,
) -> list[Split]:
    """Return splits of `nodes` that fit, fastest first, each with the trainer layout and the
    engines' tensor parallelism that make its step shortest. Of more than eight nodes, some splits
    are left out (`split_points`)."""
    found = []
    for trainer_nodes in split_points(nodes, config.placement.trainer_nodes):
        split = _best(config, trainer_nodes, nodes, gpus_per_node, device, constants, lengths)
        if split is not None:
            found.append(split)
    return sorted(found, key=lambda split: split.prediction.step_s)


def split_points(nodes: int, of_recipe: int) -> list[int]:
    """Return the numbers of trainer nodes that are tried, ascending: evenly spaced ones, powers of
    two for either side, since layouts want such, and the recipe's own."""
    step = max(nodes // _EVEN_SPLITS, 1)
    points = {of_recipe, *range(step, nodes, step)}
    for power in range(nodes.bit_length()):
        points |= {2**power, nodes - 2**power}
    return sorted(point for point in points if 0 < point < nodes)


def _best(
    config: RunConfig,
    trainer_nodes: int,
    nodes: int,
    gpus_per_node: int,
    device: str,
    constants: Constants,
    lengths: Lengths,
) -> Split | None:
    engines = list(_engines(config, nodes - trainer_nodes, gpus_per_node, device))
    if not engines:
        return None

    def predicted(changed: RunConfig, plan: Plan) -> Prediction:
        return predict_run(changed, plan, device, constants, lengths)

    # the trainer's seconds do not depend on the engines', nor theirs on its layout
    best: RunConfig | None = None
    shortest_s = float("inf")
    for changed, plan in fitting(engines[0], trainer_nodes, gpus_per_node, device):
        trainer_s = predicted(changed, plan).trainer_s
        if trainer_s < shortest_s:
            best = changed
            shortest_s = trainer_s
    if best is None:
        return None
    found = []
    for engine in engines:
        placement = engine.placement.model_copy(update={"trainer_nodes": trainer_nodes})
        changed = engine.model_copy(update={"trainer": best.trainer, "placement": placement})
        plan = plan_of(changed, device, worst_only=True)
        settings = settings_of(config, changed, ("placement", "trainer", "rollout"))
        prediction = predicted(changed, plan)
        found.append(Split(trainer_nodes, nodes - trainer_nodes, settings, prediction))
    return min(found, key=lambda split: split.prediction.step_s)


def _engines(
    config: RunConfig, rollout_nodes: int, gpus_per_node: int, device: str
) -> Iterator[RunConfig]:
    """Yield the recipe with engines that fill the nodes: of every tensor-parallel size that fits,
    and as the recipe has them."""
    facts = model_facts(config.model)
    sizes = {2**power for power in range(gpus_per_node.bit_length())}
    shapes = {(size, 1) for size in sizes if size <= gpus_per_node and gpus_per_node % size == 0}
    shapes.add((config.rollout.tensor_parallel_size, config.rollout.data_parallel_size))
    placement = config.placement.model_copy(
        update={"rollout_nodes": rollout_nodes, "gpus_per_node": gpus_per_node}
    )
    for tensor_parallel, data_parallel in sorted(shapes):
        size = tensor_parallel * data_parallel
        shape = {"tensor_parallel_size": tensor_parallel, "data_parallel_size": data_parallel}
        rollout = config.rollout.model_copy(update=shape)
        room = room_for_engines(
            config.model_copy(update={"rollout": rollout, "placement": placement})
        )
        replicas = min(room, config.batch.num_prompts)
        if replicas == 0 or (size > gpus_per_node and size % gpus_per_node):
            continue
        rollout = rollout.model_copy(update={"num_replicas": replicas})
        if any(ENGINE_RULES.broken_names(rollout, facts, False)):  # nodes have GPUs
            continue
        changed = config.model_copy(update={"rollout": rollout, "placement": placement})
        plan = plan_of(changed, device, worst_only=True)
        if plan.engine["kv_tokens"] >= rollout.max_model_len:
            yield changed


def fitting_size(
    config: RunConfig, gpus_per_node: int, most_nodes: int, device: str
) -> tuple[int, int] | None:
    """Return about the fewest trainer nodes and rollout nodes of which `node_splits` has a split:
    the smallest power of two of either side. None where at most `most_nodes` have none."""
    nodes = _powers_of_two(most_nodes)
    with_engines: RunConfig | None = None
    rollout_nodes = 0
    for rollout_nodes in nodes:
        with_engines = next(_engines(config, rollout_nodes, gpus_per_node, device), None)
        if with_engines is not None:
            break
    if with_engines is None:
        return None
    fewest = _fewest_trainer_gpus(with_engines, device) / gpus_per_node
    for trainer_nodes in nodes:
        if trainer_nodes < fewest or trainer_nodes + rollout_nodes > most_nodes:
            continue
        fits = next(fitting(with_engines, trainer_nodes, gpus_per_node, device), None)
        if fits is not None:
            return trainer_nodes, rollout_nodes
    return None


def _powers_of_two(most: int) -> list[int]:
    """Return all up to `most`, ascending."""
    return [2**power for power in range(most.bit_length())]


def _fewest_trainer_gpus(config: RunConfig, device: str) -> float:
    """Return GPUs without which no layout fits: those that weights, gradients and optimizer state
    fill, where each is there once."""
    plan = plan_of(config, device, worst_only=True)
    assert plan.usable_bytes is not None  # of a placement with GPUs
    of_one = bytes_per_parameter(ELEMENT_BYTES[config.trainer.precision])
    of_trained = of_one.gradients
    if config.trainer.distributed_optimizer and not offloads_optimizer(config):
        of_trained += of_one.optimizer
    num_bytes = of_one.weights * plan.numbers["parameters"]
    num_bytes += of_trained * plan.numbers["trained_parameters"]
    return num_bytes / plan.usable_bytes
