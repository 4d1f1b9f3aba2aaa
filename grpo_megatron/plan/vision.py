"""What a run of a model that sees cannot do yet, and what a run of another one cannot be asked."""

from collections.abc import Iterator
from typing import Any

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RewardConfig, RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.image_settings import RELEASED_LIMITS, ImageSettings
from grpo_megatron.plan.model_facts import ModelFacts, configuration_of

VISION_RULES = RuleSet()
"""Their checks take the run and the facts of its model."""

_TABLES = {
    "critic": "a critic has no vision tower of its own",
    "correction": "a retry is asked for without the images of its prompt",
    "seeding": "exemplars have no images",
    "allocation": "rounds of samples are not tried with images",
}
"""Tables of a run that ask for what is not computed with images, and why."""

_BOX_REWARD = "grpo_megatron.rewards.boxes:box_iou"


@VISION_RULES.rule("vision_kind")
def only_rl_has_images(run: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse kinds of runs that were not made for prompts with images."""
    if not model.sees_images or run.kind in ("rl", "eval"):
        return None
    close = ["rl"]
    if not run.trains:
        close = ["eval", "rl"]
    return Violation(
        "kind",
        f"a model that sees ({model.model_type}) is trained by kind rl and evaluated by kind eval; "
        "other kinds have no images",
        nearest=close,
    )


@VISION_RULES.rule("vision_tables")
def images_go_with_plain_samples(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse tables that were not made for prompts with images."""
    if not model.sees_images:
        return []
    found = []
    for table, why in _TABLES.items():
        is_critic_that_sees = table == "critic" and run.policy_has_value_head
        if getattr(run, table) is not None and not is_critic_that_sees:
            violation = Violation(
                table,
                f"{why} (the model, {model.model_type}, sees images)",
                remedy=f"remove [{table}]",
            )
            found.append(violation)
    return found


@VISION_RULES.rule("vision_episodes")
def episodes_have_no_images(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse environments and agent programs, whose requests have no images."""
    found = []
    for index, domain in enumerate(run.domains):
        if model.sees_images and domain.episodes is not None:
            violation = Violation(
                f"domains.{index}.{domain.episodes_table}",
                f"episodes have no images (the model, {model.model_type}, sees them)",
                remedy=f"remove [domains.{domain.episodes_table}]",
            )
            found.append(violation)
    return found


@VISION_RULES.rule("vision_domain")
def text_models_get_no_pictures(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse what only a model that sees can use."""
    if model.sees_images:
        return []
    return list(_useless_settings(run, model))


def _useless_settings(run: RunConfig, model: ModelFacts) -> Iterator[Violation]:
    for index, domain in enumerate(run.domains):
        settings: dict[str, Any] = {
            "source": domain.source == "shapes",
            "image_folder": domain.image_folder is not None,
        }
        for name, is_useless in settings.items():
            if is_useless:
                yield Violation(
                    f"domains.{index}.{name}",
                    f"the model ({model.model_type}) sees no images",
                    remedy="use a model that does, for example model.preset=tiny-qwen2.5-vl, or "
                    "change the domain",
                )


@VISION_RULES.rule("vision_tower")
def only_towers_are_trained(run: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse to train the tower of a model that has none."""
    if model.sees_images or run.trainer.vision_tower == "frozen":
        return None
    return Violation(
        "trainer.vision_tower",
        f"the model ({model.model_type}) has no vision tower",
        nearest=("frozen",),
    )


@VISION_RULES.rule("vision_adapters")
def adapters_are_of_the_text(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse adapters beside a tower that is trained, and those that engines would compute."""
    if not model.sees_images or run.lora is None:
        return []
    found = []
    if run.trainer.vision_tower == "trained":
        violation = Violation(
            "trainer.vision_tower",
            "with [lora] adapters of the text's layers are trained, and nothing else",
            nearest=("frozen",),
            related=("lora",),
        )
        found.append(violation)
    if run.lora.publish == "adapter":
        violation = Violation(
            "lora.publish",
            f"'adapter' was not tried with engines that see ({model.model_type})",
            nearest=("merged",),
        )
        found.append(violation)
    return found


@VISION_RULES.rule("vision_settings")
def images_can_be_prepared(run: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse a model whose files do not say how images become patches."""
    if not model.sees_images:
        return None
    hf, _ = configuration_of(run.model)
    try:
        ImageSettings.of_model(hf)
    except ConfigError as error:
        return Violation(
            "model.preset" if run.model.path is None else "model.path",
            f"{error.message} ({error.where})",
            remedy=error.remedy or "",
        )
    return None


def scales_boxes(reward: RewardConfig) -> bool:
    """Whether a reward scales the boxes of completions to the pixels of the row's file."""
    return reward.function == _BOX_REWARD and "size_fields" in reward.arguments


@VISION_RULES.rule("vision_boxes")
def boxes_are_scaled_as_images(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse rewards that scale boxes otherwise than the model's images are scaled: right boxes
    would be wrong."""
    rewards = {}
    for index, domain in enumerate(run.domains):
        for number, reward in enumerate(domain.rewards):
            if scales_boxes(reward):
                rewards[f"domains.{index}.rewards.{number}.arguments"] = reward
    if not model.sees_images or not rewards:
        return []
    hf, where = configuration_of(run.model)
    try:
        limits = ImageSettings.of_model(hf).limits
    except ConfigError:
        return []  # rule vision_settings
    found = []
    for place, reward in rewards.items():
        taken = {name: reward.arguments.get(name, RELEASED_LIMITS[name]) for name in limits}
        wrong = [name for name in limits if taken[name] != limits[name]]
        if wrong:
            told = ", ".join(f"{name} = {taken[name]}" for name in wrong)
            right = ", ".join(f"{name} = {limits[name]}" for name in wrong)
            violation = Violation(
                place,
                f"boxes are scaled with {told}, and images of the model with {right} ({where})",
                remedy=f"set {right} in these arguments",
            )
            found.append(violation)
    return found


def require_text_model(run: RunConfig, what: str) -> None:
    """Raise ConfigError where the model of a run sees images, which `what` does not know."""
    hf, where = configuration_of(run.model)
    if "vision_config" in hf:
        raise ConfigError(
            f"{what} knows no images, and the model ({hf.get('model_type')}) sees them",
            where=where,
            remedy="name a recipe of a text model",
        )
