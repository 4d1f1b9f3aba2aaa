"""Rules of `[domains.environment]` and `[domains.agent]`: episodes beside the other tables."""

import re

from grpo_megatron.config.imports import ENVIRONMENT_REWARD
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT

ENVIRONMENT_RULES = RuleSet()
"""Their checks take the run, the domain and its index."""

_REMOVE = "remove one of them"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _table(domain: DomainConfig, index: int) -> str:
    """Return the table that gives the domain its episodes."""
    return f"domains.{index}.{domain.episodes_table}"


@ENVIRONMENT_RULES.rule("environment_template")
def turns_need_a_chat_template(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse episodes beside a plain template, which has no turns."""
    if domain.episodes is None or domain.template == CHAT:
        return None
    return Violation(
        f"domains.{index}.template",
        "an environment replies in turns of the chat template, and a plain template has none",
        nearest=(CHAT,),
        related=(_table(domain, index),),
    )


@ENVIRONMENT_RULES.rule("environment_alone")
def episodes_are_sampled_once(run: RunConfig, domain: DomainConfig, index: int) -> list[Violation]:
    """Refuse what samples, retries or trains answers of one turn only."""
    if domain.episodes is None:
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
    if domain.agent is not None and run.cold_start is not None:
        others.append(("cold_start", "a cold start trains answers, or demonstrated episodes"))
    if domain.agent is not None and run.objective.advantage == "process":
        reason = "step rewards have places in the text of one answer"
        others.append(("objective.advantage", reason))
    found = []
    for key, reason in others:
        violation = Violation(
            _table(domain, index),
            f"{reason}, and this domain has episodes of several turns ({key})",
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
    if domain.episodes is not None:
        return []
    found = []
    for number, reward in enumerate(domain.rewards):
        if reward.function == ENVIRONMENT_REWARD:
            violation = Violation(
                f"domains.{index}.rewards.{number}.function",
                "the reward `environment` is the outcome of an episode, and the domain has no "
                "environment or agent",
                remedy=f"set domains.{index}.environment.name, or name a function",
                related=(f"domains.{index}.environment",),
            )
            found.append(violation)
    return found


@ENVIRONMENT_RULES.rule("environment_tokens")
def episodes_fit_into_completions(
    run: RunConfig, domain: DomainConfig, index: int
) -> Violation | None:
    """Refuse an episode that is longer than the longest completion of its domain."""
    episodes = domain.episodes
    longest = run.max_new_tokens_of(domain.name)
    if episodes is None or (episodes.episode_tokens or 0) <= longest:
        return None
    limit = "rollout.max_new_tokens"
    if domain.max_new_tokens is not None:
        limit = f"domains.{index}.max_new_tokens"
    return Violation(
        f"{_table(domain, index)}.episode_tokens",
        f"an episode cannot exceed {limit} ({longest})",
        nearest=(longest,),
        related=(limit,),
    )


@ENVIRONMENT_RULES.rule("environment_tokens")
def turns_fit_into_episodes(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a turn that is longer than its episode."""
    episodes = domain.episodes
    if episodes is None:
        return None
    longest = episodes.episode_tokens or run.max_new_tokens_of(domain.name)
    if (episodes.turn_tokens or 0) <= longest:
        return None
    return Violation(
        f"{_table(domain, index)}.turn_tokens",
        f"a turn cannot exceed the {longest} tokens of its episode",
        nearest=(longest,),
        related=(f"{_table(domain, index)}.episode_tokens",),
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
    """Refuse a cold start without turns to train, and turns that a training run never trains."""
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
    if run.trains and run.cold_start is None and environment.demonstration:
        return Violation(
            key,
            "only a cold start trains demonstrated turns, and there is none",
            remedy="remove it, or add [cold_start]",
            related=("cold_start",),
        )
    return None


@ENVIRONMENT_RULES.rule("agent_or_environment")
def one_side_drives(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a program beside an environment: both would have the policy's replies."""
    if domain.agent is None or domain.environment is None:
        return None
    return Violation(
        f"domains.{index}.agent",
        "an environment replies to the policy, and a program asks it: a domain has one of them",
        remedy=_REMOVE,
        related=(f"domains.{index}.environment",),
    )


@ENVIRONMENT_RULES.rule("agent_program")
def agents_have_one_program(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse an agent with both a command and a function, or with neither."""
    agent = domain.agent
    if agent is None or bool(agent.command) != (agent.function is not None):
        return None
    return Violation(
        f"domains.{index}.agent.command",
        "an agent is either a command or a function",
        remedy='set command = ["python", "my_agent.py"] or function = "module:function"',
        related=(f"domains.{index}.agent.function",),
    )


@ENVIRONMENT_RULES.rule("agent_program")
def agents_use_what_is_set(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse what only the other kind of program would be given."""
    agent = domain.agent
    if agent is None:
        return None
    unused = None
    if agent.function is None and agent.arguments:
        unused = ("arguments", "a command has no keyword arguments", "append them to command")
    elif agent.function is not None and agent.variables:
        unused = ("variables", "a function has no environment variables", "use arguments")
    if unused is None:
        return None
    field, problem, remedy = unused
    return Violation(f"domains.{index}.agent.{field}", problem, remedy=remedy)


@ENVIRONMENT_RULES.rule("agent_program")
def agent_functions_are_named(run: RunConfig, domain: DomainConfig, index: int) -> Violation | None:
    """Refuse a function that is not `module:function`."""
    agent = domain.agent
    if agent is None or agent.function is None or _FUNCTION.fullmatch(agent.function):
        return None
    return Violation(
        f"domains.{index}.agent.function",
        "an agent's function is named module:function",
        remedy="for example my_agent:solve",
    )
