"""Warnings: values of a valid recipe that no published run has, or that nothing reads. They stop
nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_megatron.config.objective import (
    OF_TURNS,
    SETTINGS_OF_CHOICES,
    SETTINGS_OF_WEIGHTS,
    ObjectiveConfig,
)
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import samples_of_step, whole_model
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.published_staleness import PUBLISHED_RUNS, published_range
from grpo_megatron.plan.weights import weights_of_chunk
from grpo_megatron.rundir import RunDir, run_that_writes

LEARNING_RATES = (1e-7, 1e-5)
"""Of RL of released models with AdamW: 1e-7 in GFPO (arXiv:2508.09726) and for 70B in Tülu 3
(arXiv:2411.15124); 1e-6 in DeepSeekMath (arXiv:2402.03300), DAPO (arXiv:2503.14476) and Dr. GRPO
(arXiv:2503.20783); 3e-6 in DeepSeek-R1 (arXiv:2501.12948)."""
MAX_GROUP_SIZE = 64
"""Samples a prompt: 2 in 2-GRPO (arXiv:2510.00977), 8 in Dr. GRPO, 16 in DeepSeek-R1 and DAPO, 24
in GFPO, 64 in DeepSeekMath. Rules refuse groups of one where an objective needs two."""
_STALE = 2
"""Steps that samples may be behind and need a correction; shipped recipes go one step ahead
without, as published runs do."""
_TINY_MODEL = 50_000_000
"""Parameters. Smaller models start at random and learn at a hundred times these rates (the demo:
4.5e-4)."""

ADVICE = RuleSet()
"""Their checks take the run."""


_OF_INPUTS = "newest_export"


def advice_for(config: RunConfig, *, coming: bool = False) -> list[Violation]:
    """Return what is unusual in a valid recipe, with what is usual.

    coming: runs that are to end first write inputs of this one: nothing is said of how old these
    are. Of a model that is not there yet, nothing is said that goes by its size."""
    found = list(ADVICE.violations(config, config=config))
    if coming:
        found = [violation for violation in found if violation.rule != _OF_INPUTS]
    return found


@ADVICE.rule("usual_learning_rate")
def learning_rate_is_a_published_one(config: RunConfig) -> Violation | None:
    """Warn of a learning rate of RL that no released model was trained with."""
    low, high = LEARNING_RATES
    rate = config.optimizer.lr
    if config.kind != "rl" or config.num_steps == 0 or low <= rate <= high:
        return None
    if rate > high and not _is_large(config):
        return None
    nearest = low
    if rate > high:
        nearest = high
    return Violation(
        "optimizer.lr",
        f"published RL of released models has learning rates of {low:g} to {high:g}",
        nearest=(nearest,),
    )


@ADVICE.rule(_OF_INPUTS)
def exports_are_the_newest(config: RunConfig) -> list[Violation]:
    """Warn of what a run exported before it was trained further."""
    found = []
    for key, path in config.input_paths.items():
        run = run_that_writes(path)
        if run is not None and RunDir(run).has_gone_on:
            message = f"{run} has gone on since it wrote this, and has not ended again"
            found.append(Violation(key, message, remedy="let that run end first"))
    return found


@ADVICE.rule("warmup_length")
def warmups_end(config: RunConfig) -> list[Violation]:
    """Warn of learning rates that a run is too short to bring to their peak."""
    if not config.trains or config.num_steps == 0:
        return []
    updates_per_step = config.batch.updates_per_step
    num_updates = config.num_steps * updates_per_step
    lengths = {"optimizer": (config.optimizer, num_updates)}
    if config.critic is not None:
        lengths["critic.optimizer"] = (config.critic.optimizer, num_updates)
        of_critic_alone = config.critic.warmup_steps * updates_per_step
        lengths["optimizer"] = (config.optimizer, num_updates - of_critic_alone)
    found = []
    for table, (optimizer, length) in lengths.items():
        if length <= 0 or optimizer.warmup_steps <= length:
            continue
        highest = optimizer.rate(length - 1, length)
        found.append(
            Violation(
                f"{table}.warmup_steps",
                f"the run has {length} optimizer steps, so the learning rate never gets to "
                f"{optimizer.lr:g}, but to {highest:.2g} in the last one",
                nearest=(length // 10,),
                related=("num_steps",),
            )
        )
    return found


@ADVICE.rule("idle_gpus")
def nodes_that_train_are_full(config: RunConfig) -> Violation | None:
    """Warn of more nodes that train than ranks need, where engines have nodes of their own and
    leave the GPUs between idle."""
    placement = config.placement
    if placement.gpus_per_node == 0 or placement.rollout_nodes == 0:
        return None
    needed = _nodes_of_ranks(config)
    if placement.trainer_nodes <= needed:
        return None
    num_idle = placement.num_trainer_gpus - config.trainer.num_ranks
    return Violation(
        "placement.trainer_nodes",
        f"{num_idle} of the {placement.num_trainer_gpus} GPUs of these nodes have no rank "
        f"(trainer.num_ranks = {config.trainer.num_ranks}), and engines have nodes of their own",
        nearest=(needed,),
        related=("trainer.num_ranks", "placement.rollout_nodes"),
    )


def _nodes_of_ranks(config: RunConfig) -> int:
    """Return how few nodes have a GPU for every rank, and equally many ranks each."""
    num_ranks = config.trainer.num_ranks
    num_nodes = -(-num_ranks // config.placement.gpus_per_node)
    while num_ranks % num_nodes:
        num_nodes += 1
    return num_nodes


@ADVICE.rule("vision_tower")
def images_are_guessed_in_plans(config: RunConfig) -> Violation | None:
    """Warn of what a plan does not know of the images of a model that sees."""
    if _is_to_come(config):
        return None
    hf, _ = configuration_of(config.model)
    if "vision_config" not in hf or not _is_large(config):
        return None
    return Violation(
        "model.path",
        "plans take each prompt to be one image and nothing else, as long as prompts may be "
        "(rollout.max_model_len less rollout.max_new_tokens), and memory is planned as if samples "
        "had none in common",
        remedy="--prompt-tokens says how long they are, for predicted seconds; shorter prompts "
        "need less memory; time a few steps (docs/vision.md)",
    )


@ADVICE.rule("usual_group_size")
def group_size_is_a_published_one(config: RunConfig) -> Violation | None:
    """Warn of groups that are larger than published ones."""
    size = config.batch.num_samples_per_prompt
    if config.kind != "rl" or size <= MAX_GROUP_SIZE:
        return None
    return Violation(
        "batch.num_samples_per_prompt",
        f"published runs have groups of 2 to {MAX_GROUP_SIZE} samples; more prompts (batch."
        "num_prompts) teach more for the same number of samples",
        nearest=(MAX_GROUP_SIZE,),
    )


@ADVICE.rule("without_effect")
def settings_belong_to_what_is_chosen(config: RunConfig) -> list[Violation]:
    """Warn of settings of a choice of the objective that is not the one taken."""
    if config.kind != "rl":
        return []
    own = {}
    for index, domain in enumerate(config.domains):
        if domain.objective is not None:
            own[f"domains.{index}.objective"] = domain.objective.model_dump(exclude_none=True)
    return list(_settings_without_effect(config.objective, own))


_READ_WITHOUT_ENGINES = (
    "max_model_len",
    "max_new_tokens",  # of how long answers are in plans
    "startup_timeout_s",
    "request_timeout_s",
    "max_attempts",
)
"""Settings of `[rollout]` that say something in a run without engines too: how long sequences are,
and when a role hangs."""


@ADVICE.rule("without_effect")
def settings_of_engines_have_engines(config: RunConfig) -> list[Violation]:
    """Warn of settings of engines, and of what is published to them, in a run that has none."""
    if config.num_replicas > 0:
        return []
    found = []
    for table, settings in (("rollout", config.rollout), ("publish", config.publish)):
        for name, field in type(settings).model_fields.items():
            is_read = table == "rollout" and name in _READ_WITHOUT_ENGINES
            if is_read or getattr(settings, name) == field.default:
                continue
            found.append(
                Violation(
                    f"{table}.{name}",
                    f"it has no effect: a run of kind {config.kind} has no engines",
                    remedy="remove it",
                    related=("kind",),
                )
            )
    return found


_INSTEAD = {
    ("cispo", "clip_low"): "ratio_min, the bound itself (1 - clip_low)",
    ("cispo", "clip_high"): "ratio_max, the bound itself (1 + clip_high)",
    ("topr", "clip_low"): "topr_min_negative, the bound itself",
    ("topr", "clip_high"): "topr_max_negative, the bound itself",
    ("drpo", "clip_low"): "drpo_delta",
    ("drpo", "clip_high"): "drpo_delta",
    ("kpop", "mismatch_max"): "kpop_threshold",
}
"""By choice and a setting that it does not read: the one that does it."""


def _settings_without_effect(
    objective: ObjectiveConfig, own: Mapping[str, Mapping[str, Any]]
) -> Iterator[Violation]:
    """Yield what is set and read by nothing. own: settings of domains, by key of their table."""
    for axis, settings in SETTINGS_OF_CHOICES.items():
        chosen = getattr(objective, axis)
        if ":" in chosen:  # a function of one's own may read any
            continue
        for choices, names in settings.items():
            if chosen in choices:
                continue
            for name in names:
                instead = _INSTEAD.get((chosen, name), "")
                for key in _keys_that_set(objective, own, name):
                    yield _without_effect(key, axis, chosen, choices, instead)
    for name, weight in SETTINGS_OF_WEIGHTS.items():
        if getattr(objective, weight) == 0 and objective.sets(name):
            yield Violation(
                f"objective.{name}",
                f"it has no effect: nothing reads it while {weight} is 0",
                remedy=f"remove it, or set objective.{weight}",
                related=(f"objective.{weight}",),
            )


def _without_effect(
    key: str, axis: str, chosen: str, choices: Sequence[str], instead: str
) -> Violation:
    message = f"it has no effect: only {axis} = {' or '.join(choices)} reads it, and {axis} is "
    message += chosen
    if instead:
        message += f", which has objective.{instead}"
    return Violation(
        key,
        message,
        remedy=f"remove it, or set objective.{axis}={choices[0]}",
        related=(f"objective.{axis}",),
    )


def _keys_that_set(
    objective: ObjectiveConfig, own: Mapping[str, Mapping[str, Any]], name: str
) -> list[str]:
    """Return the keys by which a setting is another than that of the preset."""
    keys = []
    if objective.sets(name):
        keys.append(f"objective.{name}")
    for table, values in own.items():
        if name in values:
            keys.append(f"{table}.{name}")
    return keys


_BY_CORRECTNESS = ("passk", "pkpo", "gtpo_entropy", "grpo_s")
"""Advantages that ask which answers are correct, and not what they earned."""


@ADVICE.rule("without_effect")
def clips_bound_what_advantages_are_made_of(config: RunConfig) -> list[Violation]:
    """Warn of a clip of the sum of rewards where advantages are made of something else. Where they
    are made of parts of the sum, it is refused (rule reward_clip)."""
    advantage = config.objective.advantage
    if config.kind != "rl":
        return []
    if advantage in _BY_CORRECTNESS:
        message = (
            f"it has no effect: advantage {advantage} asks which answers are correct, and not what "
            "they earned"
        )
    elif advantage in OF_TURNS:
        message = (
            f"it bounds the reward of an episode, and advantage {advantage} also has those that "
            "the environment gives for turns, which nothing bounds"
        )
    else:
        return []
    found = []
    for index, domain in enumerate(config.domains):
        if domain.reward_clip is not None:
            found.append(
                Violation(
                    f"domains.{index}.reward_clip",
                    message,
                    remedy="remove it, or set another objective.advantage",
                    related=("objective.advantage",),
                )
            )
    return found


@ADVICE.rule("rounded_samples")
def samples_of_rounded_weights_are_corrected(config: RunConfig) -> Violation | None:
    """Warn of samples from weights in FP8 that the loss takes for the policy's own."""
    objective = config.objective
    is_corrected = objective.mismatch != "none" or objective.proximal == "rollout"
    if config.kind != "rl" or config.num_steps == 0:
        return None
    if config.rollout.fp8 == "none" or is_corrected:
        return None
    return Violation(
        "objective.mismatch",
        "engines sample from rounded weights (rollout.fp8), and nothing weighs how far these are "
        "from the trained ones",
        nearest=("tis", "icepop"),
        related=("rollout.fp8",),
    )


@ADVICE.rule("corrected_staleness")
def stale_samples_are_corrected(config: RunConfig) -> Violation | None:
    """Warn of samples of earlier policies that the loss takes for the present one's: with log-probs
    of the trainer every ratio is 1 in the first update, whoever sampled."""
    objective = config.objective
    if config.kind != "rl" or config.num_steps == 0:
        return None
    looks_at_sampler = (
        objective.mismatch != "none"
        or objective.proximal != "recompute"
        or objective.off_policy_mask != "none"
    )
    if config.batch.max_staleness < _STALE or looks_at_sampler:
        return None
    return Violation(
        "objective.off_policy_mask",
        f"samples may be {config.batch.max_staleness} steps old, and nothing in the objective "
        f"({objective.preset}) looks at the policy that they are from; with gspo the demo "
        "unlearns so (docs/staleness.md)",
        nearest=("opsm",),
        remedy="or a preset for such samples, for example objective.preset=deepseek_v3_2",
        related=("batch.max_staleness", "objective.preset"),
    )


@ADVICE.rule("usual_staleness")
def staleness_is_a_published_one(config: RunConfig) -> list[Violation]:
    """Warn of learning rates and batches that no published run has so far ahead."""
    batch = config.batch
    if config.kind != "rl" or batch.max_staleness == 0 or config.num_steps == 0:
        return []
    behind = batch.max_staleness * batch.updates_per_step
    known = published_range(behind)
    if known is None:
        furthest = max(run.staleness for run in PUBLISHED_RUNS)
        return [
            Violation(
                "batch.max_staleness",
                f"samples may be {behind} optimizer steps behind; published runs with a known "
                f"learning rate go to {furthest}",
                nearest=(furthest // batch.updates_per_step,),
            )
        ]
    found = []
    rate = config.optimizer.lr
    if rate > known.max_learning_rate and _is_large(config):
        found.append(
            Violation(
                "optimizer.lr",
                f"published runs with samples {behind} or more optimizer steps behind have "
                f"learning rates of at most {known.max_learning_rate:g}",
                nearest=(known.max_learning_rate,),
                related=("batch.max_staleness",),
            )
        )
    samples = samples_of_step(config) // batch.updates_per_rollout
    if samples < known.min_samples:
        found.append(
            Violation(
                "batch.num_prompts",
                f"an optimizer step has {samples} samples; published runs with samples {behind} or "
                f"more optimizer steps behind have {known.min_samples} or more",
                nearest=(_prompts_for(config, known.min_samples),),
                related=("batch.max_staleness", "batch.num_samples_per_prompt"),
            )
        )
    return found


def _prompts_for(config: RunConfig, samples: int) -> int:
    """Return prompts of a step whose updates have at least `samples`."""
    needed = samples * config.batch.updates_per_rollout
    return -(-needed // config.batch.num_samples_per_prompt)


def _is_to_come(config: RunConfig) -> bool:
    """Whether another run is yet to write the model."""
    path = config.model.path
    return path is not None and not path.exists()


def _is_large(config: RunConfig) -> bool:
    """Whether the model is known to be no tiny one, without what is not trained of it (multi-token
    prediction)."""
    if _is_to_come(config):
        return False
    whole = whole_model(config)
    return sum(weight.numel for weight in weights_of_chunk(whole, 0, 0)) >= _TINY_MODEL
