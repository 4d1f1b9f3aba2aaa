"""Trainer layouts that Megatron-Core refuses, hangs on, or computes wrong without saying so."""

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.model_facts import ModelFacts

TRAINER_RULES = RuleSet()
"""Their checks take the trainer's configuration and the model's facts."""


# --- ranks


@TRAINER_RULES.rule("attention_world")
def attention_copies_fill_the_ranks(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse ranks that are no multiple of a copy of the attention weights."""
    size = trainer.attention_ranks
    if trainer.num_ranks % size == 0:
        return None
    below = trainer.num_ranks // size * size
    above = below + size
    return Violation(
        "trainer.num_ranks",
        f"num_ranks must be a multiple of TP x PP x CP = {trainer.tensor_parallel_size} x "
        f"{trainer.pipeline_parallel_size} x {trainer.context_parallel_size} = {size}",
        nearest=(below, above) if below else (above,),
        related=(
            "trainer.tensor_parallel_size",
            "trainer.pipeline_parallel_size",
            "trainer.context_parallel_size",
        ),
    )


@TRAINER_RULES.rule("expert_world")
def expert_copies_fill_the_ranks(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse ranks that are no multiple of a copy of the experts."""
    ep = trainer.expert_parallel_size
    pp = trainer.pipeline_parallel_size
    same_as_attention = ep == 1 and trainer.expert_tensor_parallel_size is None
    size = trainer.expert_ranks
    if same_as_attention or trainer.num_ranks % size == 0:
        return None
    hint = ""
    if trainer.num_ranks % (ep * pp) == 0:
        hint = (
            "set trainer.expert_tensor_parallel_size=1, so that experts are not split by TP as "
            "well; or "
        )
    field = "expert_tensor_parallel_size" if ep == 1 else "expert_parallel_size"
    return Violation(
        f"trainer.{field}",
        f"ETP x EP x PP = {trainer.etp} x {ep} x {pp} = {size} must divide num_ranks = "
        f"{trainer.num_ranks}",
        remedy=f"{hint}change trainer.expert_parallel_size or trainer.num_ranks",
        related=(
            "trainer.num_ranks",
            "trainer.expert_tensor_parallel_size",
            "trainer.tensor_parallel_size",
            "trainer.pipeline_parallel_size",
        ),
    )


# --- experts


@TRAINER_RULES.rule("experts_needed")
def expert_parallelism_has_experts(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse expert parallelism of a dense model."""
    if trainer.expert_parallel_size == 1 or model.is_moe:
        return None
    return Violation(
        "trainer.expert_parallel_size",
        f"the model ({model.model_type}) has no experts to split",
        nearest=(1,),
    )


@TRAINER_RULES.rule("experts_needed")
def expert_tensor_parallelism_has_experts(
    trainer: TrainerConfig, model: ModelFacts
) -> Violation | None:
    """Refuse expert tensor parallelism of a dense model."""
    if trainer.expert_tensor_parallel_size in (None, 1) or model.is_moe:
        return None
    return Violation(
        "trainer.expert_tensor_parallel_size",
        f"the model ({model.model_type}) has no experts to split",
        nearest=(1,),
    )


@TRAINER_RULES.rule("experts_divide")
def experts_divide_by_ep(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse experts that expert parallelism cannot split evenly."""
    ep = trainer.expert_parallel_size
    if model.num_experts % ep == 0:
        return None
    return Violation(
        "trainer.expert_parallel_size",
        f"the model's {model.num_experts} experts must be divisible by EP = {ep}",
    )


@TRAINER_RULES.rule("expert_width")
def expert_width_divides_by_etp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse an expert width that expert tensor parallelism cannot split."""
    if not model.is_moe or model.moe_intermediate_size % trainer.etp == 0:
        return None
    message = (
        f"the experts' width {model.moe_intermediate_size} must be divisible by ETP = {trainer.etp}"
    )
    if trainer.expert_tensor_parallel_size:
        return Violation("trainer.expert_tensor_parallel_size", message)
    return Violation(
        "trainer.tensor_parallel_size",
        message,
        related=("trainer.expert_tensor_parallel_size",),
    )


# --- tensor parallelism


@TRAINER_RULES.rule("heads_divide")
def heads_divide_by_tp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse attention heads that tensor parallelism cannot split."""
    tp = trainer.tensor_parallel_size
    num_kv_heads = model.num_heads if model.is_mla else model.num_kv_heads
    if model.num_heads % tp == 0 and num_kv_heads % tp == 0:
        return None
    return Violation(
        "trainer.tensor_parallel_size",
        f"the model's {model.num_heads} attention heads and {num_kv_heads} key-value heads must "
        f"both be divisible by TP = {tp}",
    )


@TRAINER_RULES.rule("mlp_width")
def mlp_width_divides_by_tp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse an MLP width that tensor parallelism cannot split."""
    tp = trainer.tensor_parallel_size
    if not model.has_dense_layers or model.intermediate_size % tp == 0:
        return None
    return Violation(
        "trainer.tensor_parallel_size",
        f"the MLP width {model.intermediate_size} must be divisible by TP = {tp}",
    )


@TRAINER_RULES.rule("shared_expert_width")
def shared_expert_width_divides_by_tp(
    trainer: TrainerConfig, model: ModelFacts
) -> Violation | None:
    """Refuse a shared experts' width that tensor parallelism cannot split."""
    tp = trainer.tensor_parallel_size
    width = model.shared_expert_intermediate_size
    if width % tp == 0:
        return None
    return Violation(
        "trainer.tensor_parallel_size",
        f"the shared experts' width {width} must be divisible by TP = {tp}",
    )


@TRAINER_RULES.rule("sequence_parallel")
def sequence_parallelism_has_tp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse sequence parallelism without tensor parallelism."""
    if not trainer.sequence_parallel or trainer.tensor_parallel_size > 1:
        return None
    return Violation(
        "trainer.sequence_parallel",
        "sequence parallelism splits along TP and needs tensor_parallel_size > 1",
        nearest=(False,),
        related=("trainer.tensor_parallel_size",),
    )


@TRAINER_RULES.rule("sequence_parallel")
def tp_has_sequence_parallelism(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse tensor without sequence parallelism where Megatron-Core needs both."""
    tp = trainer.tensor_parallel_size
    if tp == 1 or trainer.sp:
        return None
    if model.is_moe:
        layers = "MoE layers"
    elif model.is_mla:
        layers = "latent attention (MLA)"
    else:
        return None
    return Violation(
        "trainer.sequence_parallel",
        f"{layers} with TP = {tp} need sequence parallelism",
        nearest=(True,),
        related=("trainer.tensor_parallel_size",),
    )


# --- pipeline stages


def _stages_are_missing(trainer: TrainerConfig) -> bool:
    """Whether there are virtual stages without pipeline stages, told by a rule of its own."""
    has_virtual_stages = (trainer.virtual_pipeline_parallel_size or 1) > 1
    return has_virtual_stages and trainer.pipeline_parallel_size == 1


def _given_stages(trainer: TrainerConfig) -> dict[str, int]:
    """Return layers of the first and the last pipeline stage, where they are given, by field."""
    given = {}
    for field in ("first_stage_layers", "last_stage_layers"):
        layers = getattr(trainer, field)
        if layers is not None:
            given[field] = layers
    return given


@TRAINER_RULES.rule("virtual_pipeline")
def virtual_stages_have_stages(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse virtual pipeline stages without a pipeline."""
    if not _stages_are_missing(trainer):
        return None
    return Violation(
        "trainer.virtual_pipeline_parallel_size",
        "virtual pipeline stages need pipeline_parallel_size > 1",
        remedy="remove trainer.virtual_pipeline_parallel_size (or set it to null), or raise "
        "trainer.pipeline_parallel_size",
        related=("trainer.pipeline_parallel_size",),
    )


@TRAINER_RULES.rule("layers_divide")
def layers_divide_by_pp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse layers that pipeline stages cannot share evenly."""
    pp = trainer.pipeline_parallel_size
    if _given_stages(trainer) or _stages_are_missing(trainer) or model.num_layers % pp == 0:
        return None
    return Violation(
        "trainer.pipeline_parallel_size",
        f"the model's {model.num_layers} layers must be divisible by PP = {pp}",
        related=("trainer.first_stage_layers", "trainer.last_stage_layers"),
    )


@TRAINER_RULES.rule("layers_divide")
def layers_divide_by_virtual_stages(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse layers that virtual stages cannot share evenly."""
    pp = trainer.pipeline_parallel_size
    vpp = trainer.virtual_pipeline_parallel_size or 1
    told_by_another_rule = pp == 1 or model.num_layers % pp != 0
    if _given_stages(trainer) or told_by_another_rule or model.num_layers % (pp * vpp) == 0:
        return None
    return Violation(
        "trainer.virtual_pipeline_parallel_size",
        f"the model's {model.num_layers} layers must be divisible by PP x VPP = {pp} x {vpp} = "
        f"{pp * vpp}",
        related=("trainer.pipeline_parallel_size",),
    )


def _inner_layers(trainer: TrainerConfig, model: ModelFacts) -> tuple[int, int]:
    """(layers, stages) that are left beside the ends whose layers are given."""
    given = _given_stages(trainer)
    layers = model.num_layers - sum(given.values())
    stages = trainer.pipeline_parallel_size - len(given)
    return layers, stages


def _inner_layers_fit(trainer: TrainerConfig, model: ModelFacts) -> bool:
    layers, stages = _inner_layers(trainer, model)
    if trainer.pipeline_parallel_size < 2 or layers < stages:
        return False
    if stages == 0:
        return layers == 0
    return layers % stages == 0


@TRAINER_RULES.rule("deep_features")
def deep_features_stay_on_the_first_stage(
    trainer: TrainerConfig, model: ModelFacts
) -> Violation | None:
    """Refuse a first stage that lacks layers to which features of a vision tower are added."""
    pp = trainer.pipeline_parallel_size
    vpp = trainer.virtual_pipeline_parallel_size or 1
    if model.num_deep_layers == 0 or pp == 1:
        return None
    if not _inner_layers_fit(trainer, model):  # told by another rule
        return None
    layers, stages = _inner_layers(trainer, model)
    num_first = trainer.first_stage_layers or layers // stages
    if num_first // vpp >= model.num_deep_layers:
        return None
    key = "trainer.pipeline_parallel_size"
    if trainer.first_stage_layers is not None:
        key = "trainer.first_stage_layers"
    if vpp > 1:
        key = "trainer.virtual_pipeline_parallel_size"
    return Violation(
        key,
        f"the vision tower has features for the first {model.num_deep_layers} layers, and the "
        f"first pipeline stage, where it is, has {num_first // vpp} layers in its first part",
        remedy="put more layers there: fewer stages, or a larger trainer.first_stage_layers",
        related=("trainer.pipeline_parallel_size", "trainer.first_stage_layers"),
    )


@TRAINER_RULES.rule("layers_divide")
def given_stages_leave_equal_ones(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse layers that the stages between given ends cannot share evenly."""
    given = _given_stages(trainer)
    if not given or _stages_are_missing(trainer) or _inner_layers_fit(trainer, model):
        return None
    layers, stages = _inner_layers(trainer, model)
    first_given = next(iter(given))
    without_stages = trainer.pipeline_parallel_size < 2
    problem = (
        f"of the model's {model.num_layers} layers, {layers} are left for {stages} other pipeline "
        "stages and must be divisible by them"
    )
    if layers < 0:
        problem = f"the model has {model.num_layers} layers only"
    elif stages == 0:
        problem = f"there is no other pipeline stage for the other {layers} layers"
    return Violation(
        f"trainer.{first_given}",
        problem,
        remedy=f"remove trainer.{first_given}" if without_stages else "",
        related=("trainer.pipeline_parallel_size",),
    )


@TRAINER_RULES.rule("layers_divide")
def given_stages_divide_by_vpp(trainer: TrainerConfig, model: ModelFacts) -> Violation | None:
    """Refuse stages whose layers virtual stages cannot share evenly."""
    given = _given_stages(trainer)
    if not given or _stages_are_missing(trainer) or not _inner_layers_fit(trainer, model):
        return None
    layers, stages = _inner_layers(trainer, model)
    sizes = [*given.values(), layers // stages if stages else 0]
    vpp = trainer.virtual_pipeline_parallel_size or 1
    if all(size % vpp == 0 for size in sizes):
        return None
    return Violation(
        "trainer.virtual_pipeline_parallel_size",
        f"every stage's layers must be divisible by VPP = {vpp}",
        related=(f"trainer.{next(iter(given))}",),
    )
