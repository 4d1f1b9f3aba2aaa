"""Rules of `[domains.environment]`: episodes of several turns beside the other tables."""

from grpo_megatron.config.imports import ENVIRONMENT_REWARD
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT

ENVIRONMENT_RULES = RuleSet()
"""Their checks take the run, the domain and its index."""

_REMOVE = "remove one of them"


@ENVIRONMENT_RULES.rule("environment_template")
def turns_need_a_chat_template(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse an environment beside a plain template, which has no turns."""
    if domain.environment is None or domain.template == CHAT:
        return None
    return Violation(
        f"domains.{index}.template",
        "an environment replies in turns of the chat template, and a plain template has none",
        nearest=(CHAT,),
        related=(f"domains.{index}.environment",),
    )


@ENVIRONMENT_RULES.rule("environment_alone")
def episodes_are_sampled_once(run: RunConfig, domain: DomainConfig, index: int) -> list[Violation]:
    """Refuse what samples, retries or trains answers of one turn only."""
    if domain.environment is None:
        return []
    others = []
    for table in ("correction", "allocation", "seeding"):
        if getattr(run, table) is not None:
            others.append((table, f"`{table}` asks again for answers of one turn"))
    if run.distillation is not None and run.distillation.samples == "dataset":
        reason = "rollouts of a data set are answers of one turn"
        others.append(("distillation.samples", reason))
    elif run.kind in ("sft", "rejection_sample"):
        others.append(("kind", f"a run of kind {run.kind} has answers of one turn"))
    found = []
    for key, reason in others:
        violation = Violation(
            f"domains.{index}.environment",
            f"{reason}, and an environment makes episodes of several ({key})",
            remedy=_REMOVE,
            related=(key,),
        )
        found.append(violation)
    return found


@ENVIRONMENT_RULES.rule("environment_reward")
def outcomes_need_an_environment(
    run: RunConfig, domain: DomainConfig, index: int
) -> list[Violation]:
    """Refuse the reward of an episode's outcome in a domain without episodes."""
    if domain.environment is not None:
        return []
    found = []
    for number, reward in enumerate(domain.rewards):
        if reward.function == ENVIRONMENT_REWARD:
            violation = Violation(
                f"domains.{index}.rewards.{number}.function",
                "the reward `environment` is the outcome of an episode, and the domain has no "
                "environment",
                remedy=f"set domains.{index}.environment.name, or name a function",
                related=(f"domains.{index}.environment",),
            )
            found.append(violation)
    return found


@ENVIRONMENT_RULES.rule("environment_tokens")
def episodes_fit_into_completions(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse an episode that is longer than the longest completion of the engines."""
    environment = domain.environment
    longest = run.rollout.max_new_tokens
    if environment is None or (environment.episode_tokens or 0) <= longest:
        return None
    return Violation(
        f"domains.{index}.environment.episode_tokens",
        f"an episode cannot exceed rollout.max_new_tokens ({longest})",
        nearest=(longest,),
        related=("rollout.max_new_tokens",),
    )


@ENVIRONMENT_RULES.rule("environment_tokens")
def turns_fit_into_episodes(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a turn that is longer than its episode."""
    environment = domain.environment
    if environment is None:
        return None
    longest = environment.episode_tokens or run.max_new_tokens_of(domain.name)
    if (environment.turn_tokens or 0) <= longest:
        return None
    return Violation(
        f"domains.{index}.environment.turn_tokens",
        f"a turn cannot exceed the {longest} tokens of its episode",
        nearest=(longest,),
        related=(f"domains.{index}.environment.episode_tokens",),
    )


@ENVIRONMENT_RULES.rule("environment_time")
def steps_fit_into_episodes(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a step of the environment that may take longer than the episode."""
    environment = domain.environment
    if environment is None or environment.step_s <= environment.episode_s:
        return None
    return Violation(
        f"domains.{index}.environment.step_s",
        f"a step cannot take longer than its episode ({environment.episode_s:g} s)",
        nearest=(environment.episode_s,),
        related=(f"domains.{index}.environment.episode_s",),
    )


@ENVIRONMENT_RULES.rule("environment_demonstration")
def cold_starts_need_a_demonstration(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse a cold start without turns to train, and turns that nobody trains."""
    environment = domain.environment
    if environment is None:
        return None
    key = f"domains.{index}.environment.demonstration"
    if run.cold_start is not None and not environment.demonstration:
        return Violation(
            key,
            "a cold start trains demonstrated episodes, and this domain demonstrates no turn",
            remedy="give the texts of the turns, or remove [cold_start]",
            related=("cold_start",),
        )
    if run.cold_start is None and environment.demonstration:
        return Violation(
            key,
            "only a cold start trains demonstrated turns, and there is none",
            remedy="remove it, or add [cold_start]",
            related=("cold_start",),
        )
    return None
