"""Rules between `[lora]` and the other tables of a run."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig

_MOST_BYTES_OF_A_NAME = 200
_MOST_CHARACTERS_OF_A_NAME = 50  # of four bytes each at most
LORA_RUN_RULES = RuleSet()
"""Their checks take the run; those that need the model are `plan.lora.LORA_RULES`."""


@LORA_RUN_RULES.rule("lora_trains")
def adapters_are_trained(run: RunConfig) -> Violation | None:
    """Refuse adapters in a run that trains nothing."""
    if run.lora is None or run.trains:
        return None
    return Violation(
        "lora",
        f"a run of kind {run.kind!r} trains nothing",
        remedy="remove [lora], and give model.path the export of the run that trained adapters",
        related=("kind",),
    )


@LORA_RUN_RULES.rule("lora_start")
def adapters_begin_in_one_way(run: RunConfig) -> Violation | None:
    """Refuse adapters from a file after a cold start, which changes the weights below them."""
    if run.lora is None or run.lora.path is None or run.cold_start is None:
        return None
    return Violation(
        "lora.path",
        "adapters from a file belong to the weights as they are, and the cold start trains those",
        remedy="remove [cold_start] or lora.path",
        related=("cold_start",),
    )


@LORA_RUN_RULES.rule("lora_reference")
def references_are_no_averages(run: RunConfig) -> Violation | None:
    """Refuse a moving average of adapters: A and B averaged apart are not the average of B A."""
    if run.lora is None or run.objective.reference_ema is None:
        return None
    return Violation(
        "objective.reference_ema",
        "a moving average of the reference is one of weights, and with [lora] only adapters move",
        nearest=(None,),
        related=("lora", "objective.reference_interval"),
    )


@LORA_RUN_RULES.rule("lora_routers")
def routers_are_frozen(run: RunConfig) -> Violation | None:
    """Refuse selection biases that move while all weights stay."""
    if run.lora is None or run.routing.router_policy != "none":
        return None
    return Violation(
        "routing.router_policy",
        "with [lora] routers are frozen as all weights are, their selection bias too",
        nearest=("freeze_weights", "freeze_bias"),
        related=("lora",),
    )


@LORA_RUN_RULES.rule("lora_publish")
def adapters_go_through_memory(run: RunConfig) -> Violation | None:
    """Refuse adapters for engines where a publish is an exported checkpoint."""
    if not run.engine_adapters or run.publish.method != "file":
        return None
    return Violation(
        "publish.method",
        "a publish by files is a whole checkpoint, and with lora.publish = 'adapter' engines get "
        "adapters alone",
        nearest=("auto", "gloo"),
        related=("lora.publish",),
    )


@LORA_RUN_RULES.rule("lora_publish")
def adapters_are_not_beside_fp8(run: RunConfig) -> Violation | None:
    """Refuse adapters that engines compute beside weights in FP8."""
    if not run.engine_adapters or run.rollout.fp8 == "none":
        return None
    return Violation(
        "lora.publish",
        "engines that keep their weights in FP8 get adapters in these",
        nearest=("merged",),
        related=("rollout.fp8",),
    )


@LORA_RUN_RULES.rule("lora_dora")
def experts_have_magnitudes_of_their_own(run: RunConfig) -> Violation | None:
    """Refuse DoRA with adapters that experts share: their weights differ, and so their norms."""
    if run.lora is None or not run.lora.dora or run.lora.experts == "each":
        return None
    return Violation(
        "lora.experts",
        "with lora.dora every expert has a magnitude of its own, and so an adapter",
        nearest=("each",),
        related=("lora.dora",),
    )


@LORA_RUN_RULES.rule("lora_dora")
def slots_have_no_magnitudes(run: RunConfig) -> Violation | None:
    """Refuse DoRA where engines compute adapters: vLLM knows A and B only."""
    if not run.engine_adapters or run.lora is None or not run.lora.dora:
        return None
    return Violation(
        "lora.publish",
        "with lora.dora engines need weights with the adapters in them: vLLM has no magnitudes",
        nearest=("merged",),
        related=("lora.dora",),
    )


@LORA_RUN_RULES.rule("lora_precision")
def adapters_have_no_fp8(run: RunConfig) -> Violation | None:
    """Refuse FP8: the engine gets weights with adapters in them, which FP8 rounds otherwise."""
    if run.lora is None or run.trainer.fp8 == "none":
        return None
    return Violation(
        "trainer.fp8",
        "with [lora] the matrix products of the layers are not done in FP8",
        nearest=("none",),
        related=("lora",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def experts_are_trained_by_rl(run: RunConfig) -> Violation | None:
    """Refuse adapters of several domains where rewards do not train them."""
    if not run.adapter_domains or run.kind == "rl":
        return None
    return Violation(
        "lora.per_domain",
        f"domains have adapters of their own in runs of kind 'rl', and this one is {run.kind!r}",
        nearest=(False,),
        related=("kind",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def one_domain_has_the_adapter(run: RunConfig) -> Violation | None:
    """Refuse adapters by domain where there is one domain."""
    if len(run.adapter_domains) != 1:
        return None
    return Violation(
        "lora.per_domain",
        "there is one domain, and the adapter is its own",
        nearest=(False,),
        related=("domains",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def adapters_of_domains_are_not_merged(run: RunConfig) -> Violation | None:
    """Refuse one set of merged weights for several adapters."""
    if not run.adapter_domains or run.engine_adapters:
        return None
    return Violation(
        "lora.publish",
        "with lora.per_domain an engine has the adapters of all domains, each beside the weights",
        nearest=("adapter",),
        related=("lora.per_domain",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def adapters_of_domains_begin_at_zero(run: RunConfig) -> Violation | None:
    """Refuse one directory of adapters for several domains."""
    if run.lora is None or run.lora.path is None or not run.adapter_domains:
        return None
    return Violation(
        "lora.path",
        "with lora.per_domain every domain has adapters of its own, and these are one set",
        nearest=(None,),
        related=("lora.per_domain",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def adapters_of_domains_have_the_base_as_reference(run: RunConfig) -> Violation | None:
    """Refuse references that follow the adapters: of several domains there are several."""
    if not run.adapter_domains or run.objective.reference_interval == 0:
        return None
    return Violation(
        "objective.reference_interval",
        "with lora.per_domain the reference is the model without adapters, and stays it",
        nearest=(0,),
        related=("lora.per_domain",),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def adapters_of_domains_have_no_critic(run: RunConfig) -> Violation | None:
    """Refuse a critic, of which every domain would need one."""
    if not run.adapter_domains or run.critic is None:
        return None
    return Violation(
        "critic",
        "with lora.per_domain every domain is trained alone, and a critic would learn from all",
        remedy="remove [critic], choose an objective without one, or lora.per_domain=false",
        related=("lora.per_domain", "objective.preset"),
    )


@LORA_RUN_RULES.rule("lora_per_domain")
def domains_with_adapters_are_folders(run: RunConfig) -> Violation | None:
    """Refuse names of domains that no folder can have: checkpoints and exports have one of each."""
    for number, name in enumerate(run.adapter_domains):
        is_folder = "/" not in name and len(name.encode()) <= _MOST_BYTES_OF_A_NAME
        if not is_folder:
            nearest = name.replace("/", "-")[:_MOST_CHARACTERS_OF_A_NAME]
            return Violation(
                f"domains.{number}.name",
                f"with lora.per_domain every domain has a folder of its name, and {name!r} "
                "cannot be one",
                nearest=(nearest,),
                related=("lora.per_domain",),
            )
    return None
