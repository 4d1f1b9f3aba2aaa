"""Rules of `[preferences]` and of runs that train preferences."""

from grpo_megatron.config.preferences import REWARD_MODEL_LOSSES, PreferencesConfig
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig

PREFERENCE_RULES = RuleSet()
"""Their checks take the run."""

_LOSSES_OF = {
    "beta": ("dpo", "hinge", "ipo", "kto", "simpo", "orpo"),
    "label_smoothing": ("dpo", "simpo"),
    "length_normalised": ("dpo", "hinge"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "use_margins": ("bradley_terry",),
    "centre_weight": ("bradley_terry",),
    "scalar_per_domain": ("bradley_terry",),
    "step_token": ("stepwise",),
    "reference": ("dpo", "hinge", "ipo", "kto"),
}
"""Which losses look at a setting."""


@PREFERENCE_RULES.rule("preferences")
def only_preferences_have_their_table(run: RunConfig) -> Violation | None:
    """Refuse settings of preferences in runs of other kinds."""
    if run.trains_preferences or run.preferences == PreferencesConfig():
        return None
    return Violation(
        "kind",
        "only kinds preferences and reward_model have [preferences]",
        nearest=("preferences", "reward_model"),
        related=("preferences",),
    )


@PREFERENCE_RULES.rule("preferences")
def reward_models_have_their_loss(run: RunConfig) -> Violation | None:
    """Refuse losses of policies for reward models, and theirs for policies."""
    is_of_scalars = run.preferences.loss in REWARD_MODEL_LOSSES
    if not run.trains_preferences or is_of_scalars == (run.kind == "reward_model"):
        return None
    fitting: tuple[str, ...] = ("dpo",)
    if run.kind == "reward_model":
        fitting = REWARD_MODEL_LOSSES
    return Violation(
        "preferences.loss",
        f"kind reward_model and the losses {' and '.join(REWARD_MODEL_LOSSES)} go together",
        nearest=fitting,
        related=("kind",),
    )


@PREFERENCE_RULES.rule("preferences")
def reward_models_are_trained_whole(run: RunConfig) -> Violation | None:
    """Refuse adapters for a model whose head begins at random."""
    if run.kind != "reward_model" or run.lora is None:
        return None
    return Violation(
        "lora",
        "the head of a reward model is no adapter, and would not be trained",
        nearest=("null",),
        related=("kind",),
    )


@PREFERENCE_RULES.rule("preferences")
def losses_use_what_is_set(run: RunConfig) -> list[Violation]:
    """Refuse a setting that the loss does not look at."""
    settings = run.preferences
    if not run.trains_preferences:
        return []
    found = []
    for field, losses in _LOSSES_OF.items():
        default = PreferencesConfig.model_fields[field].default
        if getattr(settings, field) == default or settings.loss in losses:
            continue
        message = f"loss {settings.loss} has no use for {field}"
        if field == "reference":
            message = f"loss {settings.loss} compares the policy with no reference"
        violation = Violation(
            f"preferences.{field}",
            message,
            remedy=f"remove it, or set preferences.loss to {' or '.join(losses)}",
            related=("preferences.loss",),
        )
        found.append(violation)
    return found


@PREFERENCE_RULES.rule("preferences")
def preferences_are_in_files(run: RunConfig) -> list[Violation]:
    """Refuse problems that are generated, and domains whose answers have several turns."""
    if not run.trains_preferences:
        return []
    found = []
    for index, domain in enumerate(run.domains):
        if domain.source == "reasoning_gym":
            violation = Violation(
                f"domains.{index}.source",
                f"kind {run.kind} trains preferences, which reasoning-gym has none of",
                nearest=("file",),
                related=("kind",),
            )
            found.append(violation)
        if domain.source == "run" and run.preferences.rows == "steps":
            violation = Violation(
                f"domains.{index}.source",
                "what a run has recorded has no labels of steps",
                nearest=("file",),
                related=("preferences.loss",),
            )
            found.append(violation)
        if domain.episodes is not None:
            violation = Violation(
                f"domains.{index}.{domain.episodes_table}",
                f"kind {run.kind} generates nothing, so nobody replies to answers",
                nearest=("null",),
                related=("kind",),
            )
            found.append(violation)
    return found


@PREFERENCE_RULES.rule("preferences")
def nothing_is_sampled(run: RunConfig) -> list[Violation]:
    """Refuse what goes by the policy's answers where it gives none."""
    if not run.trains_preferences:
        return []
    unused: dict[str, object] = {}
    if run.curriculum is not None:
        unused["curriculum"] = "null"
    if run.sampling.dynamic:
        unused["sampling.dynamic"] = False
    if run.evaluation.num_samples:
        unused["evaluation.num_samples"] = 0
    if run.placement.rollout_nodes:
        unused["placement.rollout_nodes"] = 0
    if run.placement.shared_servers:
        unused["placement.shared_servers"] = ()
    found = []
    for key, value in unused.items():
        violation = Violation(
            key,
            f"a run of kind {run.kind} has no engines and samples nothing",
            nearest=(value,),
            related=("kind",),
        )
        found.append(violation)
    return found


@PREFERENCE_RULES.rule("preference_length")
def pairs_fit_into_a_microbatch(run: RunConfig) -> Violation | None:
    """Refuse micro-batches that cannot hold both answers of the longest pair."""
    if not run.trains_preferences or not run.compares_pairs:
        return None
    longest = 2 * run.rollout.max_model_len
    if run.trainer.max_tokens_per_microbatch >= longest:
        return None
    return Violation(
        "trainer.max_tokens_per_microbatch",
        f"both answers of a pair share a micro-batch, and each may have {longest // 2} tokens with "
        "its prompt",
        nearest=(longest,),
        related=("rollout.max_model_len",),
    )
