"""Rules between `[critic]` and the other tables of a run."""

from grpo_megatron.config.critic import CriticConfig
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
    """Refuse a critic of its own beside adapters: it would need all the memory that they save."""
    if not run.has_own_critic or run.lora is None:
        return None
    return Violation(
        "lora",
        "a critic with layers of its own is trained whole, and has no adapters",
        nearest=("null",),
        remedy='or set critic.trunk = "policy", or take an advantage without a critic, as '
        'objective.preset = "grpo"',
        related=("critic", "critic.trunk"),
    )


@CRITIC_RULES.rule("critic_trunk")
def heads_of_the_policy_have_nothing_of_their_own(run: RunConfig) -> list[Violation]:
    """Refuse settings of a model that a critic on the policy's layers is not."""
    critic = run.critic
    if critic is None or critic.has_own_trunk:
        return []
    usual = CriticConfig()
    why = {
        "path": "its layers are the policy's, and `seed` draws its head",
        "optimizer": "[optimizer] trains it with the policy",
        "warmup_steps": "a step that trains it trains the policy's layers",
    }
    found = []
    for name, reason in why.items():
        if getattr(critic, name) == getattr(usual, name):
            continue
        violation = Violation(
            f"critic.{name}",
            f'a critic with trunk = "policy" has none: {reason}',
            remedy=f'remove critic.{name}, or set critic.trunk = "own"',
            related=("critic.trunk",),
        )
        found.append(violation)
    return found


@CRITIC_RULES.rule("critic_loss_weight")
def losses_of_two_models_have_no_weights(run: RunConfig) -> Violation | None:
    """Refuse a weight of the value loss where nothing else trains what it trains."""
    critic = run.critic
    if critic is None or not critic.has_own_trunk:
        return None
    usual = CriticConfig().loss_weight
    if critic.loss_weight == usual:
        return None
    return Violation(
        "critic.loss_weight",
        f"{critic.loss_weight} weighs the value loss beside the policy's, and this critic has "
        "layers and an optimizer of its own",
        nearest=(usual,),
        remedy="remove critic.loss_weight and set critic.optimizer.lr, or set critic.trunk = "
        '"policy"',
        related=("critic.trunk",),
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
