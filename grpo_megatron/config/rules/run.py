"""Rules between the tables of a run: model, data, batches, sampling, routing, rates."""

from grpo_megatron.config.gates import parse_gate, refuse_beyond_reach, result_names
from grpo_megatron.config.objective import OF_TURNS
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import GrpoMegatronError

RUN_RULES = RuleSet()
"""Their checks take the run."""


# --- turns


@RUN_RULES.rule("objective")
def turns_need_an_environment(run: RunConfig) -> Violation | None:
    """Refuse advantages of turns in runs with domains whose episodes have one turn and no state."""
    if run.objective.advantage not in OF_TURNS or not run.num_steps:
        return None
    without = [domain.name for domain in run.domains if domain.environment is None]
    if not without:
        return None
    return Violation(
        "objective.advantage",
        f"{', '.join(without)} has no environment: an answer is one turn without a state, of which "
        "there is nothing to compute (objective eval computes it on a case)",
        nearest=("group",),
        remedy="give every domain an environment",
        related=("objective.preset",),
    )


# --- the model


@RUN_RULES.rule("model_source")
def a_model_is_named(run: RunConfig) -> Violation | None:
    """Refuse a recipe without a model."""
    if run.model.preset is not None or run.model.path is not None:
        return None
    return Violation(
        "model.preset",
        "exactly one of model.preset and model.path must be set; neither is",
        remedy="name a preset, or give the path of a Hugging Face checkpoint",
        related=("model.path",),
    )


@RUN_RULES.rule("model_source")
def only_released_models_have_both(run: RunConfig) -> Violation | None:
    """Refuse a path beside a preset that is initialised at random."""
    name = run.model.preset
    if run.model.path is None or name not in preset_names():
        return None
    if load_preset(name).checkpoint:
        return None
    return Violation(
        "model.preset",
        "exactly one of model.preset and model.path must be set, unless the model is released",
        remedy="remove one of them",
        related=("model.path",),
    )


@RUN_RULES.rule("model_preset")
def the_preset_exists(run: RunConfig) -> Violation | None:
    """Refuse an unknown model preset."""
    name = run.model.preset
    known = preset_names()
    if name is None or name in known:
        return None
    close = nearest(name, known)
    remedy = ""
    if not close:
        remedy = f"presets: {', '.join(known)}"
    return Violation(
        "model.preset",
        f"no model preset is called {name!r}",
        nearest=close,
        remedy=remedy,
    )


# --- prompts


@RUN_RULES.rule("domain_weights")
def a_domain_is_trained(run: RunConfig) -> Violation | None:
    """Refuse domains whose weights are all 0."""
    if any(domain.weight for domain in run.domains):
        return None
    return Violation("domains.0.weight", "a run trains on at least one domain", nearest=(1.0,))


@RUN_RULES.rule("problem_counts")
def problems_are_left_for_training(run: RunConfig) -> Violation | None:
    """Refuse splits that keep every problem out of training."""
    counts = []
    for domain in run.domains:
        if domain.num_problems is None:
            return None
        counts.append(domain.num_problems)
    total = sum(counts)
    num_validation = run.data.num_validation
    num_heldout = run.data.num_heldout
    if total > num_validation + num_heldout:
        return None
    counted = [f"domains.{index}.num_problems" for index in range(len(counts))]
    return Violation(
        "data.num_heldout",
        f"the domains have {total} problems; validation ({num_validation}) and held-out "
        f"({num_heldout}) prompts leave none for training",
        remedy="raise domains.*.num_problems, or keep fewer prompts out of training",
        related=("data.num_validation", *counted),
    )


@RUN_RULES.rule("validation_prompts")
def accuracy_has_prompts(run: RunConfig) -> Violation | None:
    """Refuse accuracy while training without validation prompts."""
    measured = run.cold_start is not None or run.evaluation.interval > 0
    if not measured or run.data.num_validation > 0:
        return None
    return Violation(
        "data.num_validation",
        "accuracy is measured on validation prompts, and there are none",
        nearest=(512,),
        related=("cold_start.target_accuracy", "evaluation.interval"),
    )


@RUN_RULES.rule("evaluated_prompts")
def an_evaluation_has_prompts(run: RunConfig) -> Violation | None:
    """Refuse to evaluate on nothing."""
    if run.kind != "eval" or run.data.num_heldout > 0:
        return None
    return Violation(
        "data.num_heldout",
        "an evaluation measures accuracy on held-out prompts, and there are none",
        nearest=(512,),
        related=("kind",),
    )


# --- batches and sampling


@RUN_RULES.rule("updates_per_rollout")
def updates_have_prompts(run: RunConfig) -> Violation | None:
    """Refuse more optimizer steps than prompts in a batch."""
    batch = run.batch
    if batch.updates_per_rollout <= batch.num_prompts:
        return None
    return Violation(
        "batch.updates_per_rollout",
        f"a batch of {batch.num_prompts} prompts cannot be split into "
        f"{batch.updates_per_rollout} updates",
        nearest=(batch.num_prompts,),
        related=("batch.num_prompts",),
    )


@RUN_RULES.rule("token_baseline_sampling")
def token_baselines_know_the_whole_distribution(run: RunConfig) -> Violation | None:
    """Refuse truncated sampling where gradients are estimated from the whole vocabulary."""
    truncation = run.rollout.truncation
    advantage = run.objective.advantage
    if run.kind != "rl" or advantage not in ("otb", "opob") or not truncation:
        return None
    untruncated = {"top_k": "null", "top_p": 1.0, "min_p": 0.0}
    name = next(iter(truncation))
    return Violation(
        f"rollout.{name}",
        f"advantage {advantage} weighs by probabilities of the whole vocabulary, and "
        f"{name} = {truncation[name]:g} trains those of a part",
        nearest=(untruncated[name],),
        remedy='or set advantage = "opo"',
        related=("objective.advantage",),
    )


@RUN_RULES.rule("zero_variance_resample")
def groups_are_not_resampled(run: RunConfig) -> Violation | None:
    """Refuse resampling at a higher temperature."""
    if run.sampling.zero_variance != "resample":
        return None
    return Violation(
        "sampling.zero_variance",
        "is not offered: completions sampled at a higher temperature have other log-probs than "
        "the trainer's, which are all at rollout.temperature",
        nearest=("drop",),
        remedy="set sampling.zero_variance=drop, or sampling.dynamic=true to draw other prompts",
    )


@RUN_RULES.rule("dropped_rewards")
def dropped_rewards_are_not_shaped(run: RunConfig) -> Violation | None:
    """Refuse raw deviations of the batch with shaped rewards and dropped groups."""
    drops_groups = run.sampling.dynamic or run.sampling.zero_variance == "drop"
    if run.objective.advantage_std != "batch_raw" or not drops_groups:
        return None
    if run.objective.reward_shaping == "none":
        return None
    return Violation(
        "objective.reward_shaping",
        "batch_raw counts the rewards of groups that were dropped, and those are not shaped",
        nearest=("none",),
        remedy="set reward_shaping to none, keep all groups, or divide by another deviation",
        related=("objective.advantage_std", "sampling.dynamic", "sampling.zero_variance"),
    )


@RUN_RULES.rule("deterministic_surplus")
def surplus_is_not_deterministic(run: RunConfig) -> Violation | None:
    """Refuse surplus groups in deterministic runs."""
    if run.sampling.surplus_staleness == 0 or not run.rollout.deterministic:
        return None
    return Violation(
        "sampling.surplus_staleness",
        "surplus groups are kept in memory, a resumed run lacks them: rollout.deterministic "
        "cannot hold",
        nearest=(0,),
        related=("rollout.deterministic",),
    )


@RUN_RULES.rule("too_old_on_policy")
def only_rollouts_ahead_are_too_old(run: RunConfig) -> Violation | None:
    """Refuse to mask old tokens where there are none."""
    if run.batch.too_old == "drop" or run.batch.max_staleness > 0:
        return None
    return Violation(
        "batch.too_old",
        "no token is too old with max_staleness=0: a step is sampled by the weights that it trains",
        nearest=("drop",),
        remedy="set batch.too_old=drop or batch.max_staleness=1",
        related=("batch.max_staleness",),
    )


@RUN_RULES.rule("adapted_staleness")
def only_rollouts_ahead_adapt(run: RunConfig) -> Violation | None:
    """Refuse to adapt a bound that leaves no choice."""
    if not run.batch.adapt_staleness or run.batch.max_staleness > 1:
        return None
    return Violation(
        "batch.adapt_staleness",
        f"the bound stays between 1 and batch.max_staleness, which is {run.batch.max_staleness}: "
        "there is nothing to adapt",
        nearest=(False,),
        remedy="set batch.adapt_staleness=false or batch.max_staleness=4",
        related=("batch.max_staleness",),
    )


@RUN_RULES.rule("deterministic_staleness")
def stale_rollouts_are_not_deterministic(run: RunConfig) -> Violation | None:
    """Refuse rollouts ahead of training in deterministic runs."""
    if run.batch.max_staleness == 0 or not run.rollout.deterministic:
        return None
    return Violation(
        "batch.max_staleness",
        "which weights a sample sees depends on timing when rollouts run ahead, so "
        "rollout.deterministic cannot hold",
        nearest=(0,),
        remedy="set batch.max_staleness=0 or rollout.deterministic=false",
        related=("rollout.deterministic",),
    )


# --- lengths


@RUN_RULES.rule("microbatch_length")
def samples_fit_into_a_microbatch(run: RunConfig) -> Violation | None:
    """Refuse micro-batches that cannot hold the longest sample."""
    longest = run.rollout.max_model_len
    if run.trainer.max_tokens_per_microbatch >= longest:
        return None
    return Violation(
        "trainer.max_tokens_per_microbatch",
        f"a sample of up to {longest} tokens must fit into a micro-batch",
        nearest=(longest,),
        related=("rollout.max_model_len",),
    )


# --- routing


def _weighs_keep_routing(run: RunConfig) -> bool:
    if run.routing.keep_weight:
        return True
    return any(domain.keep_routing_weight for domain in run.domains)


@RUN_RULES.rule("offload_optimizer")
def only_sharded_bfloat16_state_is_offloaded(run: RunConfig) -> Violation | None:
    """Refuse what Megatron-Core's HybridDeviceOptimizer does not take: it makes the float32 weights
    of bfloat16 ones, from the shards of the distributed optimizer."""
    trainer = run.trainer
    if not trainer.offload_optimizer:
        return None
    if trainer.precision != "bfloat16":
        return Violation(
            "trainer.offload_optimizer",
            "the host has the float32 weights of bfloat16 ones, and precision is "
            f"{trainer.precision!r}",
            nearest=(False,),
            remedy="set trainer.precision to 'bfloat16'",
            related=("trainer.precision",),
        )
    if not trainer.distributed_optimizer:
        return Violation(
            "trainer.offload_optimizer",
            "only state that is sharded can be on the host, and distributed_optimizer is false",
            nearest=(False,),
            remedy="set trainer.distributed_optimizer to true",
            related=("trainer.distributed_optimizer",),
        )
    return None


@RUN_RULES.rule("offload_optimizer")
def state_of_adapters_stays_on_gpus(run: RunConfig) -> Violation | None:
    """Refuse to move what is small."""
    if run.lora is None or not run.trainer.offload_optimizer:
        return None
    return Violation(
        "trainer.offload_optimizer",
        "[lora] trains adapters, whose optimizer state is small",
        nearest=(False,),
        remedy="leave it on the GPUs",
        related=("lora.rank",),
    )


@RUN_RULES.rule("keep_routing")
def a_keep_loss_has_a_weight(run: RunConfig) -> Violation | None:
    """Refuse a keep-routing loss that no weight switches on."""
    if run.routing.keep_loss == "none" or _weighs_keep_routing(run):
        return None
    return Violation(
        "routing.keep_loss",
        "a keep-routing loss and its weight are set together",
        remedy="set routing.keep_weight, for example 1e-3",
        related=("routing.keep_weight",),
    )


@RUN_RULES.rule("keep_routing")
def a_keep_weight_has_a_loss(run: RunConfig) -> Violation | None:
    """Refuse a weight of a keep-routing loss that there is not."""
    if run.routing.keep_loss != "none" or not _weighs_keep_routing(run):
        return None
    return Violation(
        "routing.keep_loss",
        "a keep-routing loss and its weight are set together",
        remedy="set routing.keep_loss, for example set_mass",
        related=("routing.keep_weight",),
    )


@RUN_RULES.rule("routing_replay")
def losses_of_replayed_experts_need_replay(run: RunConfig) -> list[Violation]:
    """Refuse losses on replayed experts without replay."""
    routing = run.routing
    if routing.replay != "none":
        return []
    wanting = []
    if routing.keep_loss in ("set_mass", "cross_entropy"):
        wanting.append("routing.keep_loss")
    if routing.balance_weight > 0:
        wanting.append("routing.balance_weight")
    found = []
    for key in wanting:
        violation = Violation(
            "routing.replay",
            f"{key} counts replayed experts, and none are replayed",
            nearest=("r3", "r2"),
            related=(key,),
        )
        found.append(violation)
    return found


# --- the optimizer and the end of a run


@RUN_RULES.rule("min_lr")
def rates_decay_downwards(run: RunConfig) -> list[Violation]:
    """Refuse a final learning rate above the peak."""
    tables = {"optimizer": run.optimizer}
    if run.cold_start is not None:
        tables["cold_start.optimizer"] = run.cold_start.optimizer
    found = []
    for table, optimizer in tables.items():
        if optimizer.min_lr > optimizer.lr:
            violation = Violation(
                f"{table}.min_lr",
                f"the rate decays from lr ({optimizer.lr:g}) to min_lr, so min_lr cannot be above",
                nearest=(optimizer.lr,),
                related=(f"{table}.lr",),
            )
            found.append(violation)
    return found


@RUN_RULES.rule("gate")
def gates_can_be_read(run: RunConfig) -> list[Violation]:
    """Refuse gates that are no conditions, of values that the run does not measure, or of what
    they cannot be: shares beyond 0 to 1, more steps or prompts than the run has."""
    names = result_names(run)
    found = []
    for text in run.gates:
        try:
            refuse_beyond_reach(parse_gate(text, names), run)
        except GrpoMegatronError as error:
            found.append(Violation("gates", error.message, remedy=error.remedy or ""))
    return found
