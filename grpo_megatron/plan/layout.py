"""Parallel layouts: the rules that they must obey, and the nearest layouts that do.

TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert-tensor,
data parallel size. Ranks are TP x PP x CP x DP for attention, ETP x EP x PP x EDP for experts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from grpo_megatron.config.problems import Violation, broken, cases_of
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.layout_rules import ROLLOUT_RULES, TRAINER_RULES, is_cpu_engine
from grpo_megatron.plan.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer and a rollout layout for one model on one machine."""

    trainer: TrainerConfig
    facts: ModelFacts
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cpu: bool = field(default_factory=is_cpu_engine)


def check_layout(case: Case) -> list[Violation]:
    """All violated layout rules of trainer and engine, each with the nearest valid values."""
    known = {"c": case, "t": case.trainer, "f": case.facts}
    found = [*broken(TRAINER_RULES, known, case.trainer, case.facts),
             *broken(ROLLOUT_RULES, known, case.rollout, case.facts, case.cpu)]
    return [_with_nearest(case, violation) for violation in found]


def refuse_layout(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """For commands without rollout. Raises ConfigError with every rule that is violated."""
    known = {"c": Case(trainer, facts), "t": trainer, "f": facts}
    if found := list(broken(TRAINER_RULES, known, trainer, facts)):
        raise ConfigError("\n".join(f"{v.key}: {v.message}" for v in found),
                          where="command line", remedy=found[0].remedy)


def _broken_rules(case: Case) -> set[str]:
    found = (*cases_of(TRAINER_RULES, case.trainer, case.facts),
             *cases_of(ROLLOUT_RULES, case.rollout, case.facts, case.cpu))
    return {name.partition(".")[0] for name, _ in found}


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
    value, found, (table, name) = violation.value, [], violation.key.split(".")
    reach = max(value, case.trainer.num_ranks, 64)

    def broken_with(size: int) -> set[str]:
        layout = getattr(case, table).model_copy(update={name: size})
        return _broken_rules(replace(case, **{table: layout}))

    for sizes in (range(value - 1, 0, -1), range(value + 1, value + reach + 1)):
        found += [next((size for size in sizes if accepts(broken_with(size))), None)]
    return tuple(sorted(filter(None, found), key=lambda size: (abs(size - value), size)))
