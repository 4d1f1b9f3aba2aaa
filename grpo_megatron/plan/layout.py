"""Parallel layouts: the rules that they must obey, and the nearest layouts that do.

TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert-tensor
and data parallel size. Attention is split over TP x PP x CP x DP ranks, experts over
ETP x EP x PP x EDP; both products are the number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from grpo_megatron.config.problems import Violation, broken, cases_of
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.layout_rules import ROLLOUT_RULES, TRAINER_RULES, Engines, installed_engines
from grpo_megatron.plan.model_facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer and a rollout layout for one model on one machine."""

    trainer: TrainerConfig
    facts: ModelFacts
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engines: Engines = field(default_factory=installed_engines)


def check_layout(case: Case) -> list[Violation]:
    """All violated layout rules of trainer and engine, each with the nearest valid values."""
    known = {"c": case, "t": case.trainer, "f": case.facts}
    found = [*broken(TRAINER_RULES, known, case.trainer, case.facts, case.engines),
             *broken(ROLLOUT_RULES, known, case.rollout, case.facts, case.engines)]
    return [_with_nearest(case, violation) for violation in found]


def refuse_layout(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """For commands without rollout. Raises ConfigError with every rule that is violated."""
    known = {"c": Case(trainer, facts), "t": trainer, "f": facts}
    if found := list(broken(TRAINER_RULES, known, trainer, facts, installed_engines())):
        raise ConfigError("\n".join(f"{v.key}: {v.message}" for v in found),
                          where="command line", remedy=found[0].remedy)


def obeys_trainer_rules(trainer: TrainerConfig, facts: ModelFacts) -> bool:
    return not any(cases_of(TRAINER_RULES, trainer, facts, installed_engines()))


def _broken_rules(case: Case) -> set[str]:
    tables = ((TRAINER_RULES, case.trainer), (ROLLOUT_RULES, case.rollout))
    return {name.partition(".")[0] for rules, layout in tables
            for name, _ in cases_of(rules, layout, case.facts, case.engines)}


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
