"""Parallel layouts: the rules that they must obey, and the nearest layouts that do.

TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert-tensor,
data parallel size. Ranks are TP x PP x CP x DP for attention, ETP x EP x PP x EDP for experts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from grpo_megatron.config.rules.rule_set import Violation
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.engine_rules import ENGINE_RULES, is_cpu_engine
from grpo_megatron.plan.model_facts import ModelFacts
from grpo_megatron.plan.trainer_rules import TRAINER_RULES

_LARGEST_SIZE = 4096
"""Of a group of ranks that is suggested; searched one by one."""


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer and a rollout layout for one model on one machine.

    Attributes:
        cpu: Whether the engines are of vLLM's CPU build.
        has_engines: Whether the run has any; the rules of engines hold for no other."""

    trainer: TrainerConfig
    facts: ModelFacts
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cpu: bool = field(default_factory=is_cpu_engine)
    has_engines: bool = True

    def with_size(self, key: str, size: int) -> "Case":
        """Return this case with another value of a key of the recipe, `trainer.…` or
        `rollout.…`."""
        table, name = key.split(".")
        if table == "trainer":
            return replace(self, trainer=self.trainer.model_copy(update={name: size}))
        assert table == "rollout"  # no rule of layouts is about another table
        return replace(self, rollout=self.rollout.model_copy(update={name: size}))


def check_layout(case: Case) -> list[Violation]:
    """Return all violated layout rules of trainer and engine, each with the nearest valid
    values."""
    found = list(TRAINER_RULES.violations(case.trainer, case.facts, config=case))
    if case.has_engines:
        found += ENGINE_RULES.violations(case.rollout, case.facts, case.cpu, config=case)
    return [_with_nearest(case, violation) for violation in found]


def refuse_layout(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """Check a layout for commands without rollout. Raises ConfigError with every rule that is
    violated."""
    case = Case(trainer, facts)
    found = list(TRAINER_RULES.violations(trainer, facts, config=case))
    if found:
        messages = [f"{violation.key}: {violation.message}" for violation in found]
        raise ConfigError("\n  ".join(messages), where="command line", remedy=found[0].remedy)


def _broken_rules(case: Case) -> set[str]:
    names = set(TRAINER_RULES.broken_names(case.trainer, case.facts))
    if case.has_engines:
        names.update(ENGINE_RULES.broken_names(case.rollout, case.facts, case.cpu))
    return names


def _with_nearest(case: Case, violation: Violation) -> Violation:
    """Search values of the key that mend this rule and break no other; failing that, mend it."""
    if violation.nearest or type(violation.value) is not int:
        return violation
    other_rules = _broken_rules(case) - {violation.rule}

    def mends_without_harm(broken: set[str]) -> bool:
        return broken.issubset(other_rules)

    def mends(broken: set[str]) -> bool:
        return violation.rule not in broken

    found = _search(case, violation, mends_without_harm)
    if not found:
        found = _search(case, violation, mends)
    return replace(violation, nearest=found)


def _largest_size(case: Case) -> int:
    """Return a bound of what a valid layout has of anything but ranks."""
    facts = case.facts
    return max(facts.num_layers, facts.num_experts, facts.num_heads, _LARGEST_SIZE)


def _search(
    case: Case, violation: Violation, accepts: Callable[[set[str]], bool]
) -> tuple[int, ...]:
    """Return the closest accepted value below and the closest above, closest first.

    accepts: takes the names of the rules that a value breaks."""
    value = violation.value
    below = value - 1
    above = value + max(value, case.trainer.num_ranks, 64)
    if not violation.key.endswith(".num_ranks"):
        largest = _largest_size(case)
        below = min(below, largest)
        above = min(above, largest)

    def is_accepted(size: int) -> bool:
        changed = case.with_size(violation.key, size)
        return accepts(_broken_rules(changed))

    found = []
    for sizes in (range(below, 0, -1), range(value + 1, above + 1)):
        closest = next((size for size in sizes if is_accepted(size)), None)
        if closest is not None:
            found.append(closest)
    return tuple(sorted(found, key=lambda size: (abs(size - value), size)))
