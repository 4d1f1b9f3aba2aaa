"""Which linear layers of a model can have adapters, by Hugging Face's names."""

from collections.abc import Sequence

from grpo_megatron.config.lora import ALL_LINEAR, LoraConfig, is_target
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.suggest import nearest
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.model_facts import ModelFacts

LORA_RULES = RuleSet()
"""Their checks take the run, its [lora], and the facts of its model."""


def linear_layers(model: ModelFacts) -> list[str]:
    """Name the linear layers of the decoder's layers, such as `self_attn.q_proj`, each kind once.

    Of an expert the number is left out: `mlp.experts.down_proj`."""
    names = []
    for parameter, tensors in family_of(model.model_type).layer.items():
        if ".linear_" not in parameter or not parameter.endswith(".weight"):
            continue
        if not _has(model, parameter):
            continue
        if isinstance(tensors, str):
            tensors = [tensors]
        for tensor in tensors:
            names.append(tensor.removesuffix(".weight").replace("{expert}.", ""))
    return names


def _has(model: ModelFacts, parameter: str) -> bool:
    """Whether a model has this parameter of its family's table in some layer."""
    if parameter.startswith("mlp.experts."):
        return model.is_moe
    if parameter.startswith("mlp.shared_experts."):
        return model.shared_expert_intermediate_size > 0
    if parameter.startswith("mlp."):
        return model.has_dense_layers
    if "linear_q_down_proj" in parameter or "linear_q_up_proj" in parameter:
        return model.query_rank > 0
    if "linear_q_proj" in parameter:
        return model.query_rank == 0
    return True


def bound_layers(lora: LoraConfig, model: ModelFacts) -> list[str]:
    """Name the linear layers that get adapters, as `linear_layers` names them."""
    return [layer for layer in linear_layers(model) if is_target(layer, lora.targets)]


def why_not_adapters(theirs: LoraConfig, ours: LoraConfig, model: ModelFacts) -> str:
    """Return why adapters of `model` that were trained with [lora] `theirs` are none to begin with
    under `ours`: the first thing in which both differ; empty where they are."""
    values = {
        "rank": (theirs.rank, ours.rank),
        "alpha": (theirs.alpha_value, ours.alpha_value),
        "rank_stabilised": (theirs.rank_stabilised, ours.rank_stabilised),
        "dora": (theirs.dora, ours.dora),
    }
    for name, (their_value, our_value) in values.items():
        if their_value != our_value:
            return f"{name} of [lora] is {as_toml(their_value)} there and {as_toml(our_value)} here"
    their_layers = set(bound_layers(theirs, model))
    our_layers = set(bound_layers(ours, model))
    if their_layers != our_layers:
        only_one = ", ".join(sorted(their_layers ^ our_layers))
        return f"targets of [lora] name {only_one} in one of both only"
    has_experts = any(".experts." in layer for layer in our_layers)
    if has_experts and (theirs.experts, ours.experts) == ("each", "shared"):
        return "each expert has its own adapters there, and experts share them here"
    return ""


MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM's slots may have (0.32.0, config/lora.py)."""


def max_lora_rank(rank: int) -> int:
    """Return the rank of the narrowest slots that an adapter of `rank` fits into.

    Raises ValueError where there are none."""
    return min(slots for slots in MAX_LORA_RANKS if slots >= rank)


def engine_layers(lora: LoraConfig, model: ModelFacts) -> list[str]:
    """Name the layers for which an engine has slots, by the last part of their names."""
    return sorted({layer.rpartition(".")[2] for layer in bound_layers(lora, model)})


def _replaced(names: Sequence[str], old: str, new: str) -> list[str]:
    """Return the names with `new` in the place of `old`."""
    found = []
    for name in names:
        if name == old:
            name = new
        found.append(name)
    return found


@LORA_RULES.rule("lora_targets")
def targets_name_layers(run: RunConfig, lora: LoraConfig, model: ModelFacts) -> list[Violation]:
    """Refuse every target that names no linear layer of the model."""
    layers = linear_layers(model)
    known = [ALL_LINEAR]
    for layer in layers:
        parts = layer.split(".")
        known += [parts[-1], *parts[:-1], layer]
    found = []
    for target in lora.targets:
        if any(is_target(layer, (target,)) for layer in layers):
            continue
        close = []
        for name in _meant(target, list(dict.fromkeys(known))):
            close.append(_replaced(lora.targets, target, name))
        remedy = ""
        if not close:
            remedy = f"the linear layers of {model.model_type} are {', '.join(layers)}"
        found.append(
            Violation(
                "lora.targets",
                f"{target!r} names no linear layer of the model ({model.model_type})",
                nearest=close,
                remedy=remedy,
            )
        )
    return found


_MOST_MEANT = 3


def _meant(target: str, known: Sequence[str]) -> list[str]:
    """Return the names that a target may stand for, best first: those that it begins, shortest
    first, then those that are like it."""
    begun = sorted((name for name in known if name.startswith(target)), key=len)
    return list(dict.fromkeys([*begun, *nearest(target, known)]))[:_MOST_MEANT]


@LORA_RULES.rule("lora_targets")
def every_stage_has_adapters(
    run: RunConfig, lora: LoraConfig, model: ModelFacts
) -> Violation | None:
    """Refuse targets that some layers do not have, for a pipeline stage may then have no
    adapters."""
    if not _may_lack_adapters(run, bound_layers(lora, model), model):
        return None
    remedy = "name a layer of the attention too, for example o_proj"
    if model.is_mla and lora.publish == "adapter":
        remedy += ', and set lora.publish = "merged"'
    return Violation(
        "lora.targets",
        "dense layers and layers with experts have different targets, and with pipeline stages "
        f"(PP = {run.trainer.pipeline_parallel_size}) one might have none",
        remedy=remedy,
        related=("trainer.pipeline_parallel_size",),
    )


def _may_lack_adapters(run: RunConfig, bound: Sequence[str], model: ModelFacts) -> bool:
    """Whether a pipeline stage may have no layer of those that get adapters, `bound`."""
    is_mixed = model.is_moe and model.has_dense_layers
    if run.trainer.pipeline_parallel_size == 1 or not is_mixed or not bound:
        return False
    return not any(layer.startswith("self_attn.") for layer in bound)


@LORA_RULES.rule("lora_experts")
def shared_adapters_have_experts(
    run: RunConfig, lora: LoraConfig, model: ModelFacts
) -> Violation | None:
    """Refuse adapters that experts share where no expert has any."""
    bound = bound_layers(lora, model)
    if lora.experts == "each" or any(".experts." in layer for layer in bound):
        return None
    return Violation(
        "lora.experts",
        f"lora.targets names no routed experts of the model ({model.model_type})",
        nearest=("each",),
        related=("lora.targets",),
    )


@LORA_RULES.rule("lora_experts")
def shared_adapters_are_split_as_attention_is(
    run: RunConfig, lora: LoraConfig, model: ModelFacts
) -> Violation | None:
    """Refuse shared adapters where experts are split over some of the tensor ranks."""
    trainer = run.trainer
    if lora.experts == "each" or trainer.etp in (1, trainer.tensor_parallel_size):
        return None
    return Violation(
        "trainer.expert_tensor_parallel_size",
        f"adapters that experts share need ETP = 1 or TP = {trainer.tensor_parallel_size}",
        nearest=(1, trainer.tensor_parallel_size),
        related=("lora.experts",),
    )


@LORA_RULES.rule("lora_publish")
def slots_are_wide_enough(run: RunConfig, lora: LoraConfig, model: ModelFacts) -> Violation | None:
    """Refuse adapters of a rank for which vLLM has no slots."""
    widest = MAX_LORA_RANKS[-1]
    if lora.publish == "merged" or lora.rank <= widest:
        return None
    return Violation(
        "lora.rank",
        f"lora.publish = 'adapter' needs vLLM's slots for adapters, whose rank is at most {widest}",
        nearest=(widest,),
        remedy="or lora.publish = 'merged'",
        related=("lora.publish",),
    )


@LORA_RULES.rule("lora_publish")
def experts_have_no_slots(run: RunConfig, lora: LoraConfig, model: ModelFacts) -> Violation | None:
    """Refuse adapters of routed experts where engines compute adapters.

    vLLM does so with kernels of Triton's, which no CPU has and which never ran here."""
    layers = bound_layers(lora, model)
    has_routed = any(".experts." in layer for layer in layers)
    if lora.publish == "merged" or not has_routed:
        return None
    others = _layers_with_slots(run, layers, model)
    remedy = ""
    if others:
        remedy = f"or lora.targets = {as_toml(others)}"
    return Violation(
        "lora.publish",
        "'adapter' is for attention, dense layers and shared experts, and lora.targets names "
        f"routed experts of the model ({model.model_type})",
        nearest=("merged",),
        remedy=remedy,
        related=("lora.targets",),
    )


def _layers_with_slots(run: RunConfig, layers: Sequence[str], model: ModelFacts) -> list[str]:
    """Return targets that engines compute adapters of, and no rule refuses: those of `layers`, or
    else the attention; none where there are none."""
    others = []
    for layer in layers:
        has_slot = ".experts." not in layer
        if model.is_mla and layer.startswith("self_attn."):
            has_slot = False  # see `latent_attention_has_no_slots`
        if has_slot:
            others.append(layer)
    if _may_lack_adapters(run, others, model):
        return []
    if not others and not model.is_mla:
        return ["self_attn"]
    return others


@LORA_RULES.rule("lora_publish")
def latent_attention_has_no_slots(
    run: RunConfig, lora: LoraConfig, model: ModelFacts
) -> Violation | None:
    """Refuse adapters of latent attention: vLLM multiplies its up projections into others when it
    loads them (0.32.0, mla_attention.py), and would leave out what adapters add to them."""
    layers = bound_layers(lora, model)
    has_attention = any(layer.startswith("self_attn.") for layer in layers)
    if lora.publish == "merged" or not model.is_mla or not has_attention:
        return None
    return Violation(
        "lora.publish",
        f"'adapter' is not for latent attention ({model.model_type}): the engine computes it with "
        "products of its weights, which adapters do not reach",
        nearest=("merged",),
        related=("lora.targets",),
    )
