"""Trainer layouts of a number of GPUs that obey every rule and fit, best first."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpo_megatron.config.engine_places import most_ranks_of_node
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.rules.placement import PLACEMENT_RULES
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.devices import device_bytes
from grpo_megatron.plan.engine_share import arguments_with_share
from grpo_megatron.plan.fp8_weights import FP8_RULES
from grpo_megatron.plan.lora import LORA_RULES
from grpo_megatron.plan.memory import Plan, plan_of
from grpo_megatron.plan.model_facts import ModelFacts, model_facts
from grpo_megatron.plan.trainer_rules import TRAINER_RULES

_RECOMPUTE_COST = 1 / 3
_TENSOR_COST = 0.08
_CONTEXT_COST = 0.05
_FAR_COST = 0.15
"""Time lost by full recomputation, every doubling of TP and CP, EP over nodes: rules of thumb."""
_CONTEXT_SIZES = (1, 2, 4, 8, 16)
_LEAST_PART = 8192
"""Tokens that context parallelism leaves a rank of a micro-batch, at least."""


def search(
    config: RunConfig,
    nodes: int,
    gpus_per_node: int,
    device: str,
    seconds_of: Callable[[RunConfig, Plan], float] | None = None,
) -> list[dict[str, Any]]:
    """Return all layouts that fit on trainer nodes of a shape, cheapest first, the roomier of
    equals: `settings` (overrides of the recipe), `bytes` of the fullest rank, `bubble_fraction`,
    and `cost`, the relative time of a token: 1 without recomputation, bubble, tensor and context
    parallelism. With `seconds_of` also `step_s`, what it says of the recipe with this layout."""
    found = []
    for changed, plan in fitting(config, nodes, gpus_per_node, device):
        row = {
            "settings": settings_of(config, changed, ("placement", "trainer")),
            "bytes": plan.worst.total,
            "cost": _cost(changed.trainer, plan, gpus_per_node),
            "bubble_fraction": plan.numbers["bubble_fraction"],
        }
        if seconds_of is not None:
            row["step_s"] = seconds_of(changed, plan)
        found.append(row)
    return sorted(found, key=lambda row: (round(row["cost"], 3), row["bytes"]))


def fitting(
    config: RunConfig, nodes: int, gpus_per_node: int, device: str
) -> Iterator[tuple[RunConfig, Plan]]:
    """Yield the recipe with every trainer layout that fits on trainer nodes of a shape, and its
    plan. Layouts have all GPUs that the run's engines leave; where none of them fits, as many on
    every node as the next power of two."""
    placement = config.placement.model_copy(
        update={"trainer_nodes": nodes, "gpus_per_node": gpus_per_node}
    )
    placed = config.model_copy(update={"placement": placement})
    most_ranks = most_ranks_of_node(placed)
    if most_ranks == 0:
        return
    are_found = False
    for layout in _fitting_with(placed, nodes * most_ranks, device):
        are_found = True
        yield layout
    power = 2 ** (most_ranks.bit_length() - 1)
    if not are_found and power < most_ranks:
        yield from _fitting_with(placed, nodes * power, device)


def largest_fitting_share(
    config: RunConfig, nodes: int, gpus_per_node: int, device: str
) -> float | None:
    """Return the largest share of a GPU that engines may take so that some trainer layout fits
    beside them on trainer nodes of a shape; None where no share leaves both what they need, and
    where trainer and engines do not share GPUs."""
    placement = config.placement.model_copy(
        update={"trainer_nodes": nodes, "gpus_per_node": gpus_per_node}
    )
    placed = config.model_copy(update={"placement": placement})
    shares = plan_of(placed, device, worst_only=True).shares
    if not placed.shares_gpus or shares is None:
        return None
    arguments = arguments_with_share(config.rollout, shares.least)
    rollout = config.rollout.model_copy(update={"engine_arguments": arguments})
    with_least = config.model_copy(update={"rollout": rollout})
    largest: float | None = None
    for _, plan in fitting(with_least, nodes, gpus_per_node, device):
        assert plan.shares is not None  # of a placement with GPUs
        largest = max(largest or 0.0, plan.shares.most)
    return largest


def _fitting_with(config: RunConfig, ranks: int, device: str) -> Iterator[tuple[RunConfig, Plan]]:
    """Yield the recipe with every layout of so many trainer ranks that fits, and its plan."""
    facts = model_facts(config.model)
    for trainer in _layouts(config.trainer, facts, ranks, config.placement.gpus_per_node):
        hopeless = _expert_bytes(facts, trainer) > device_bytes(device)
        if hopeless or any(TRAINER_RULES.broken_names(trainer, facts)):
            continue
        changed = config.model_copy(update={"trainer": trainer})
        if _breaks_a_rule(changed, facts):
            continue
        plan = plan_of(changed, device, worst_only=True)
        assert plan.usable_bytes is not None  # of a placement with GPUs
        if plan.worst.total <= plan.usable_bytes:
            yield changed, plan


def _breaks_a_rule(config: RunConfig, facts: ModelFacts) -> bool:
    """Whether a layout breaks a rule of its placement, of weights in FP8 or of adapters."""
    if any(PLACEMENT_RULES.broken_names(config)):
        return True
    if config.rollout.fp8 != "none" and any(FP8_RULES.broken_names(config, facts)):
        return True
    return config.lora is not None and any(LORA_RULES.broken_names(config, config.lora, facts))


def settings_of(config: RunConfig, changed: RunConfig, tables: Sequence[str]) -> str:
    """Return what `changed` sets differently from `config` in some tables, as overrides."""
    found = []
    for table in tables:
        old = getattr(config, table).model_dump()
        for name, value in getattr(changed, table).model_dump().items():
            if value != old[name]:
                found.append(f"{table}.{name}={as_toml(value)}")
    return " ".join(found)


def _layouts(
    trainer: TrainerConfig, facts: ModelFacts, ranks: int, gpus_per_node: int
) -> Iterator[TrainerConfig]:
    powers = [2**i for i in range(ranks.bit_length())]
    expert_parallel_sizes = [1]
    expert_tensor_parallel_size = None
    if facts.is_moe:
        expert_parallel_sizes = powers
        expert_tensor_parallel_size = 1
    for tp, cp, pp, ep, vpp, recompute in itertools.product(
        [size for size in powers if size <= gpus_per_node],
        _context_sizes(trainer),
        powers,
        expert_parallel_sizes,
        (None, 2, 4),
        ("none", "full"),
    ):
        if max(tp * cp, ep) * pp > ranks or pp > facts.num_layers:
            continue
        last_stage_layers = None
        if facts.num_layers % pp:
            last = facts.num_layers - math.ceil(facts.num_layers / pp) * (pp - 1)
            if last > 0:
                last_stage_layers = last
        yield trainer.model_copy(
            update={
                "num_ranks": ranks,
                "tensor_parallel_size": tp,
                "context_parallel_size": cp,
                "pipeline_parallel_size": pp,
                "expert_parallel_size": ep,
                "virtual_pipeline_parallel_size": vpp,
                "expert_tensor_parallel_size": expert_tensor_parallel_size,
                "recompute": recompute,
                "first_stage_layers": None,
                "sequence_parallel": None,
                "last_stage_layers": last_stage_layers,
            }
        )


def _context_sizes(trainer: TrainerConfig) -> list[int]:
    """Return sizes that leave a rank rows of a length worth splitting."""
    tokens = trainer.max_tokens_per_microbatch
    return [size for size in _CONTEXT_SIZES if size == 1 or tokens // size >= _LEAST_PART]


def _expert_bytes(facts: ModelFacts, trainer: TrainerConfig) -> float:
    """Return weights and gradients of a rank's experts: they rule most layouts out at once."""
    ranks = trainer.expert_parallel_size * trainer.pipeline_parallel_size
    width = facts.num_experts * len(facts.moe_layers) * facts.moe_intermediate_size
    return 3 * 6 * facts.hidden_size * width / ranks


def _cost(trainer: TrainerConfig, plan: Plan, gpus_per_node: int) -> float:
    """Return what a layout costs by rules of thumb; 1 for one without any communication."""
    lost = _TENSOR_COST * math.log2(trainer.tensor_parallel_size)
    lost += _CONTEXT_COST * math.log2(trainer.context_parallel_size)
    if trainer.expert_parallel_size > gpus_per_node:
        lost += _FAR_COST
    recomputed = 1.0
    if trainer.recompute == "full":
        recomputed += _RECOMPUTE_COST
    return recomputed * (1 + lost) / (1 - plan.numbers["bubble_fraction"])
