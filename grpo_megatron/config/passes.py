"""Which passes without gradients a step takes over its samples before it is trained, and what
they are for. The trainer and the plan ask here, so that what is planned is what is run."""

from collections.abc import Collection

from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import RunConfig

_OF_ADVANTAGES = {
    "otb": {"old_logprobs", "squared_probs"},
    "opob": {"old_logprobs", "squared_probs", "sampled_logprobs", "rollout_logprobs"},
    "gtpo_entropy": {"entropies"},
    "grpo_s": {"entropies"},
    "eda": {"entropies"},
    "xrpo": {"old_logprobs"},
    "gtpo_conflict": {"token_ids", "entropies"},
    "gae": {"values"},
}
"""Token columns that estimators and shapings read, by name."""
_OF_THE_OLD_PASS = {"old_logprobs", "sampled_logprobs", "entropies", "squared_probs"}
"""Token columns that a pass of the old policy finds."""


def advantage_columns(o: ObjectiveConfig, *, weighs_kl: bool) -> frozenset[str]:
    """Return the names of the token columns from which registered advantages are computed.
    weighs_kl: see `weighs_kl`."""
    needed = set(_OF_ADVANTAGES.get(o.advantage, ()))
    needed.update(_OF_ADVANTAGES.get(o.shaping, ()))
    if o.advantage == "otb" and o.mismatch != "none":
        needed.add("rollout_logprobs")
    if o.kl == "reward_k1" and weighs_kl:
        needed.update(("old_logprobs", "ref_logprobs"))
    return frozenset(needed)


def loss_columns(o: ObjectiveConfig) -> frozenset[str]:
    """Return the names of the token columns by which the loss chooses tokens
    (`algorithms.token_selection`), and an optimizer step its size (`algorithms.step_size`)."""
    needed = set()
    if o.top_entropy_share < 1:
        needed.add("entropies")
    if o.clip in ("clip_cov", "kl_cov"):
        needed.add("old_logprobs")
    if o.off_policy_mask == "m2po" or o.ess_scaling != "none":
        needed.update(("sampled_logprobs", "rollout_logprobs"))
    return frozenset(needed)


def weighs_kl(config: RunConfig) -> bool:
    """Whether a KL to the reference has a weight in any domain."""
    if config.objective.kl == "none":
        return False
    for domain in config.domains:
        if config.objective.for_domain(domain.objective).kl_beta > 0:
            return True
    return False


def wants_reference(config: RunConfig) -> bool:
    """Whether the loss or the advantages of a run are made of the reference's log-probs."""
    if config.kind != "rl":
        return False
    return weighs_kl(config) or config.objective.preference_weight > 0


def has_reference(config: RunConfig) -> bool:
    """Whether a run keeps a reference at all, if only to measure the KL to it."""
    if config.kind != "rl":
        return False
    is_measured = config.objective.kl != "none" and config.objective.monitor_share > 0
    return is_measured or wants_reference(config)


def compares_routers(config: RunConfig, *, has_routers: bool) -> bool:
    """Whether the loss asks how far the routers have shifted since the old policy."""
    return has_routers and config.objective.router_shift_floor is not None


def takes_old_pass(
    config: RunConfig,
    columns: Collection[str],
    *,
    has_routers: bool,
    num_updates: int,
    is_stale: bool,
) -> bool:
    """Whether a step has a pass of the policy from before it. Without one, its log-probs are those
    that the first optimizer step finds.

    columns: the token columns that advantages and loss need; num_updates: optimizer steps of the
    step; is_stale: some of its tokens were sampled by older weights."""
    is_on_policy = num_updates == 1 and not is_stale
    loss_needs_it = not is_on_policy and config.objective.proximal != "interpolated"
    columns_need_it = bool(_OF_THE_OLD_PASS & set(columns))
    shift_needs_it = compares_routers(config, has_routers=has_routers) and num_updates > 1
    routing_needs_it = has_routers and _routing_needs_old_routes(config)
    return (
        loss_needs_it
        or columns_need_it
        or shift_needs_it
        or routing_needs_it
        or config.policy_has_value_head
    )


def _routing_needs_old_routes(config: RunConfig) -> bool:
    """Whether the losses of routers are about what the old policy's routers chose."""
    settings = config.routing
    if settings.keep_loss == "kl":
        return True
    has_loss = settings.keep_loss != "none" or settings.balance_weight > 0
    return has_loss and settings.replay == "r2"


def num_whole_passes(config: RunConfig, *, has_routers: bool) -> int:
    """Return how many passes without gradients a step takes over all of its samples: the old
    policy's, each reference's, the routers' of later updates, preference margins', teachers'; of
    KTO the one over as many answers to other prompts, for its baseline. Of an advantage of one's
    own, the token columns are not known here."""
    if config.trains_preferences:
        return int(config.preferences.loss == "kto")
    if config.kind == "distil":
        if config.distillation is None:
            return 0
        teachers = config.distillation.teachers
        return len([teacher for teacher in teachers if teacher.path is not None])
    if config.kind != "rl":
        return 0
    objective = config.objective
    num_updates = config.batch.updates_per_step
    columns = advantage_columns(objective, weighs_kl=weighs_kl(config)) | loss_columns(objective)
    passes = 0
    if takes_old_pass(
        config,
        columns,
        has_routers=has_routers,
        num_updates=num_updates,
        is_stale=config.batch.max_staleness > 0,
    ):
        passes += 1
    if compares_routers(config, has_routers=has_routers) and num_updates > 1:
        passes += 1
    if objective.preference_weight > 0:
        passes += 1
    if wants_reference(config):
        passes += len({domain.reference for domain in config.domains})
    return passes
