"""Rules between `[critic]` and the other tables of a run."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig

CRITIC_RULES = RuleSet()
"""Their checks take the run."""


@CRITIC_RULES.rule("critic")
def values_have_a_critic(run: RunConfig) -> Violation | None:
    """Refuse advantages that are made of values where nothing predicts any."""
    if run.objective.advantage != "gae" or run.critic is not None:
        return None
    if run.kind != "rl" or run.num_steps == 0:
        return None
    return Violation(
        "objective.advantage",
        "gae takes the values of a critic, and there is no [critic]",
        nearest=("group",),
        remedy="add a table [critic], or take an advantage without a critic",
        related=("critic",),
    )


@CRITIC_RULES.rule("critic")
def critics_are_asked(run: RunConfig) -> Violation | None:
    """Refuse a critic whose values nothing uses."""
    if run.critic is None or run.objective.advantage == "gae":
        return None
    return Violation(
        "critic",
        f"advantage {run.objective.advantage} takes no values, so that a critic would be trained "
        "for nothing",
        nearest=("null",),
        remedy='remove [critic], or set objective.preset = "ppo"',
        related=("objective.advantage",),
    )


@CRITIC_RULES.rule("critic")
def critics_belong_to_rl(run: RunConfig) -> Violation | None:
    """Refuse critics where no advantages are computed."""
    if run.critic is None or run.kind == "rl":
        return None
    return Violation(
        "critic",
        f"a run of kind {run.kind!r} has no advantages",
        nearest=("null",),
        related=("kind",),
    )


@CRITIC_RULES.rule("critic")
def critics_are_trained_whole(run: RunConfig) -> Violation | None:
    """Refuse a critic beside adapters: it would need all the memory that they save."""
    if run.critic is None or run.lora is None:
        return None
    return Violation(
        "lora",
        "a critic is trained whole, and has no adapters of its own",
        nearest=("null",),
        remedy='or remove [critic] and take an advantage without one, as objective.preset = "grpo"',
        related=("critic",),
    )


@CRITIC_RULES.rule("critic_warmup")
def the_policy_is_trained_too(run: RunConfig) -> Violation | None:
    """Refuse a warm-up that leaves no step in which the policy is trained."""
    if run.critic is None or run.num_steps == 0 or run.critic.warmup_steps < run.num_steps:
        return None
    return Violation(
        "critic.warmup_steps",
        f"the run has {run.num_steps} steps, in which the policy would never be trained",
        nearest=(run.num_steps - 1,),
        related=("num_steps",),
    )
