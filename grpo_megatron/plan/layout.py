"""Parallel layouts: the sizes that follow from a layout, and the rules that it must obey.

TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert-tensor
and data parallel size. Attention is split over TP x PP x CP x DP ranks, experts over
ETP x EP x PP x EDP; both products are the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from grpo_megatron.config.problems import Violation
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.rules import broken, cases_of
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan import rollout_rules, trainer_rules
from grpo_megatron.plan.case import Case
from grpo_megatron.plan.machine import Engines, installed_engines
from grpo_megatron.plan.model_facts import ModelFacts

_RULES = {**trainer_rules.RULES, **rollout_rules.RULES}


@dataclass(frozen=True, slots=True)
class LayoutSizes:
    """Sizes that follow from a valid layout."""

    data_parallel_size: int  # ranks that hold the same attention weights and other samples
    expert_tensor_parallel_size: int  # resolved
    expert_data_parallel_size: int  # ranks that hold the same experts
    sequence_parallel: bool  # resolved


def layout_sizes(trainer: TrainerConfig) -> LayoutSizes:
    """Sizes of a layout that `check_layout` accepts; ValueError if they do not divide the ranks."""
    attention, experts = _split_over(trainer)
    if trainer.num_ranks % attention or trainer.num_ranks % experts:
        raise ValueError(f"{trainer.num_ranks} ranks cannot hold TP x PP x CP = {attention} and "
                         f"ETP x EP x PP = {experts}")
    return LayoutSizes(trainer.num_ranks // attention, trainer.etp, trainer.num_ranks // experts,
                       trainer.sp)


def check_layout(trainer: TrainerConfig, rollout: RolloutConfig, facts: ModelFacts,
                 engines: Engines) -> list[Violation]:
    """All violated layout rules of trainer and engine, each with the nearest valid values."""
    case = Case(trainer, rollout, facts, engines)
    violations = broken(_RULES, {"c": case, "t": trainer, "f": facts}, case)
    return [_with_nearest(case, violation) for violation in violations]


def smallest_world(trainer: TrainerConfig) -> int:
    """The fewest ranks that can hold the layout."""
    return math.lcm(*_split_over(trainer))


def _split_over(t: TrainerConfig) -> tuple[int, int]:
    """TP x PP x CP and ETP x EP x PP."""
    return (t.tensor_parallel_size * t.pipeline_parallel_size * t.context_parallel_size,
            t.etp * t.expert_parallel_size * t.pipeline_parallel_size)


def refuse_layout(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """For commands without rollout. Raises ConfigError with every rule that is violated."""
    case = Case(trainer, RolloutConfig(), facts, installed_engines())
    found = list(broken(trainer_rules.RULES, {"c": case, "t": trainer, "f": facts}, case))
    if found:
        raise ConfigError("\n".join(f"{v.key}: {v.message}" for v in found),
                          where="command line", remedy=found[0].remedy)


def obeys_trainer_rules(trainer: TrainerConfig, facts: ModelFacts) -> bool:
    """Whether a layout breaks no rule of the trainer here."""
    case = Case(trainer, RolloutConfig(), facts, installed_engines())
    return not any(cases_of(trainer_rules.RULES, case))


def _broken_rules(case: Case) -> set[str]:
    return {name.partition(".")[0] for name, _ in cases_of(_RULES, case)}


def _with_nearest(case: Case, violation: Violation) -> Violation:
    """Search values of the key that mend this rule and break no other; failing that, mend it."""
    if violation.nearest or type(violation.value) is not int:
        return violation

    others = _broken_rules(case) - {violation.rule}
    found = _search(case, violation, lambda broken: broken <= others) or _search(
        case, violation, lambda broken: violation.rule not in broken)
    return replace(violation, nearest=found)


def _search(case: Case, violation: Violation,
            accepts: Callable[[set[str]], bool]) -> tuple[int, ...]:
    """The closest accepted value below and the closest above, closest first."""
    value, found = violation.value, []
    reach = max(value, case.trainer.num_ranks, 64)
    for sizes in (range(value - 1, 0, -1), range(value + 1, value + reach + 1)):
        found += [next((size for size in sizes if accepts(_broken_rules(case.with_value(
            violation.key, size)))), None)]
    return tuple(sorted(filter(None, found), key=lambda size: (abs(size - value), size)))
