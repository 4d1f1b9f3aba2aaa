"""Rules of `[placement]`: nodes, GPUs, and who shares them."""

from grpo_megatron.config.engine_places import room_for_engines
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig

PLACEMENT_RULES = RuleSet()
"""Their checks take the run."""


@PLACEMENT_RULES.rule("placement")
def nodes_have_equally_many_ranks(run: RunConfig) -> Violation | None:
    """Refuse ranks that do not fill the trainer nodes evenly."""
    ranks = run.trainer.num_ranks
    nodes = run.placement.trainer_nodes
    if ranks % nodes == 0:
        return None
    return Violation(
        "placement.trainer_nodes",
        f"every node trains with equally many ranks: trainer.num_ranks = {ranks} cannot be split "
        f"over {nodes} nodes",
        remedy="set placement.trainer_nodes to a divisor of trainer.num_ranks",
        related=("trainer.num_ranks",),
    )


@PLACEMENT_RULES.rule("placement")
def ranks_have_gpus(run: RunConfig) -> Violation | None:
    """Refuse more trainer ranks than GPUs."""
    placement = run.placement
    gpus = placement.num_trainer_gpus
    if placement.gpus_per_node == 0 or run.trainer.num_ranks <= gpus:
        return None
    return Violation(
        "trainer.num_ranks",
        f"{placement.trainer_nodes} trainer node(s) of {placement.gpus_per_node} GPUs have {gpus}, "
        "and every rank needs one",
        nearest=(gpus,),
        related=("placement.trainer_nodes", "placement.gpus_per_node"),
    )


@PLACEMENT_RULES.rule("placement")
def engines_have_gpus(run: RunConfig) -> Violation | None:
    """Refuse more engines than the nodes that generate have room for."""
    if not run.placement.gpus_per_node:
        return None
    room = room_for_engines(run)
    if run.num_replicas <= room:
        return None
    size = run.rollout.num_workers
    fitting_counts: tuple[int, ...] = (room,)
    remedy = ""
    if room == 0:
        fitting_counts = ()
        remedy = (
            "raise placement.rollout_nodes, or lower rollout.tensor_parallel_size or "
            "rollout.data_parallel_size"
        )
    return Violation(
        "rollout.num_replicas",
        f"the nodes that generate have room for {room} engine(s) of {size} GPU(s)",
        nearest=fitting_counts,
        remedy=remedy,
        related=(
            "placement.mode",
            "placement.rollout_nodes",
            "placement.gpus_per_node",
            "rollout.tensor_parallel_size",
            "rollout.data_parallel_size",
        ),
    )


@PLACEMENT_RULES.rule("placement")
def wide_servers_fill_nodes(run: RunConfig) -> Violation | None:
    """Refuse servers that are wider than a node and do not fill nodes evenly, with whole engines
    on each where they have several."""
    gpus = run.placement.gpus_per_node
    rollout = run.rollout
    has_engines = run.num_replicas > 0
    if not gpus or not has_engines or rollout.num_workers <= gpus:
        return None
    tp = rollout.tensor_parallel_size
    fills_nodes = rollout.num_workers % gpus == 0
    has_whole_engines = rollout.data_parallel_size == 1 or gpus % tp == 0
    if fills_nodes and has_whole_engines:
        return None
    related = ("rollout.data_parallel_size", "placement.gpus_per_node")
    if rollout.data_parallel_size == 1:
        return Violation(
            "rollout.tensor_parallel_size",
            f"an engine of {tp} GPUs does not fill nodes of {gpus}: one that is wider than a node "
            "takes whole nodes",
            nearest=(gpus, -(-tp // gpus) * gpus),
            related=related,
        )
    fitting = tuple(size for size in range(1, min(tp, gpus) + 1) if gpus % size == 0)
    return Violation(
        "rollout.tensor_parallel_size",
        f"data-parallel engines of {tp} GPUs do not fill nodes of {gpus}: a server of "
        f"{rollout.num_workers} GPUs takes whole nodes, each with whole engines",
        nearest=fitting[-1:],
        related=related,
    )


@PLACEMENT_RULES.rule("environment_nodes")
def nodes_of_environments_have_servers(run: RunConfig) -> Violation | None:
    """Refuse nodes for servers of environments that would have none."""
    nodes = run.placement.environment_nodes
    num_servers = len(run.environment_servers)
    if nodes <= num_servers:
        return None
    return Violation(
        "placement.environment_nodes",
        f"{nodes} node(s) for servers of environments, and the domains have {num_servers} "
        "server(s) in all",
        nearest=(num_servers,),
        remedy="or raise environment.servers of a domain",
        related=tuple(f"domains.{index}.environment.servers" for index in _with_servers(run)),
    )


def _with_servers(run: RunConfig) -> list[int]:
    return [index for index, domain in enumerate(run.domains) if domain.num_environment_servers]


@PLACEMENT_RULES.rule("colocated_staleness")
def shared_devices_take_turns(run: RunConfig) -> Violation | None:
    """Refuse rollouts ahead of training on the same devices."""
    shared = run.placement.mode == "colocated" or bool(run.placement.shared_servers)
    if not shared or run.batch.max_staleness == 0:
        return None
    return Violation(
        "batch.max_staleness",
        "trainer and engines, or judges, take turns on the same devices: no rollout runs while "
        "training",
        nearest=(0,),
        related=("placement.mode", "placement.shared_servers"),
    )
