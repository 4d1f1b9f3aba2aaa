"""Every rule that needs a recipe only, applied to one."""

from grpo_megatron.config.rules.allocation import ALLOCATION_RULES
from grpo_megatron.config.rules.critic import CRITIC_RULES
from grpo_megatron.config.rules.distillation import DISTILLATION_RULES
from grpo_megatron.config.rules.domain import DOMAIN_RULES
from grpo_megatron.config.rules.engines import ENGINE_RULES
from grpo_megatron.config.rules.environment import ENVIRONMENT_RULES
from grpo_megatron.config.rules.experience import EXPERIENCE_RULES
from grpo_megatron.config.rules.lora import LORA_RUN_RULES
from grpo_megatron.config.rules.objective import BATCH_RULES, OBJECTIVE_RULES
from grpo_megatron.config.rules.placement import PLACEMENT_RULES
from grpo_megatron.config.rules.preferences import PREFERENCE_RULES
from grpo_megatron.config.rules.rule_set import Violation
from grpo_megatron.config.rules.run import RUN_RULES
from grpo_megatron.config.rules.secrets import SECRET_RULES
from grpo_megatron.config.run import RunConfig


def check_rules(run: RunConfig) -> list[Violation]:
    """Return everything in which the tables of `run` contradict one another."""
    found: list[Violation] = []
    of_run = (
        RUN_RULES,
        ALLOCATION_RULES,
        DISTILLATION_RULES,
        PREFERENCE_RULES,
        EXPERIENCE_RULES,
        PLACEMENT_RULES,
        LORA_RUN_RULES,
        SECRET_RULES,
        CRITIC_RULES,
    )
    for rules in of_run:
        found += rules.violations(run, config=run)
    if run.num_replicas:
        found += ENGINE_RULES.violations(run, config=run)
    for index, domain in enumerate(run.domains):
        for rules in (DOMAIN_RULES, ENVIRONMENT_RULES):
            found += rules.violations(run, domain, index, config=run)
    found += OBJECTIVE_RULES.violations(run.objective, config=run)
    if run.num_steps and run.kind in ("rl", "experience"):  # others have no advantages
        found += BATCH_RULES.violations(run.objective, run.batch, config=run)
    return found
