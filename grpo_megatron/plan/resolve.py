"""Load a recipe with every rule applied: those of the schema, the model and the machine."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from grpo_megatron.config.loader import ResolvedConfig, load_recipe, read_resolved
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.plan.adapter_files import refuse_other_adapters
from grpo_megatron.plan.critic_model import CRITIC_MODEL_RULES
from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.fp8_weights import FP8_RULES
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.lora import LORA_RULES
from grpo_megatron.plan.model_facts import ModelFacts, facts_from_hf, model_facts
from grpo_megatron.plan.models_beside import MODEL_BESIDE_RULES
from grpo_megatron.plan.reward_labels import REWARD_LABEL_RULES
from grpo_megatron.plan.vision import VISION_RULES
from grpo_megatron.rundir import run_that_writes

# vLLM 0.32.0, v1/attention/backends/cpu_attn.py; with another the first request ends the engine
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

_IN_CHECKPOINTS = ("critic.path", "lora.path")
"""Keys of what a run begins with and its checkpoints have."""


def resolve(recipe: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read, override and validate a recipe; ConfigError with everything that is wrong."""
    return load_recipe(recipe, overrides, checks=(check_plan,))


def resolve_run(path: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Return what `resolve` does, for a run's stored configuration with more overrides on top.
    ConfigError also where they change what its checkpoints have optimizer state for."""
    resolved = read_resolved(path, overrides, checks=(check_plan,))
    tower = resolved.config.trainer.vision_tower
    tower_of_run = read_resolved(path).config.trainer.vision_tower
    if tower != tower_of_run:
        raise ConfigError(
            f"trainer.vision_tower is {tower!r}, and the run's checkpoints are of one that is "
            f"{tower_of_run}: optimizer states differ",
            where=str(path),
            remedy=f"leave it at {tower_of_run!r}, or train anew from an export of the run",
        )
    return resolved


def refuse_missing(
    config: RunConfig, *, coming: bool = False, has_checkpoint: bool = False
) -> None:
    """DataError for the first input of `config` that does not exist, CheckpointError for adapters
    that are not those of [lora]. `coming`: one of a run, whose directory holds config.json, will
    do, because a submitted run is to write it; `has_checkpoint`: the run goes on after one, which
    has the critic and the adapters."""
    for key, path in config.input_paths.items():
        if has_checkpoint and key in _IN_CHECKPOINTS:
            continue
        is_of_run = (path.parent / "config.json").exists() or run_that_writes(path) is not None
        if not path.exists() and not (coming and is_of_run):
            raise DataError(
                f"{key}: no such file or directory",
                where=str(path.absolute()),
                remedy="paths are relative to the directory the command runs in",
            )
    # what is there before a run has written it anew says nothing
    has_own = coming or has_checkpoint
    if config.lora is not None and config.lora.path is not None and not has_own:
        refuse_other_adapters(config.lora, config.lora.path)


def check_plan(config: RunConfig) -> list[Violation]:
    """Return what the model and the layout rules have against a configuration."""
    model = config.model
    if model.preset not in (None, *preset_names()) or not (model.path or model.preset):
        return []  # told by the rules of the schema
    try:
        facts = model_facts(model)
    except ConfigError as error:
        key = "model.preset" if model.path is None else "model.path"
        unreadable = Violation(
            key,
            f"{error.message} ({error.where})",
            remedy=error.remedy or "",
            rule="model_unreadable",
            value=str(model.path or model.preset),
        )
        return [unreadable]
    found = list(MODEL_RULES.violations(config, facts, config=config))
    found += VISION_RULES.violations(config, facts, config=config)
    found += CRITIC_MODEL_RULES.violations(config, config=config)
    found += MODEL_BESIDE_RULES.violations(config, config=config)
    found += REWARD_LABEL_RULES.violations(config, config=config)
    has_engines = config.num_replicas > 0
    if has_engines and config.rollout.fp8 != "none":
        found += FP8_RULES.violations(config, facts, config=config)
    if config.lora is not None:
        found += LORA_RULES.violations(config, config.lora, facts, config=config)
    cpu = _generates_on_cpu(config)
    found += check_layout(Case(config.trainer, facts, config.rollout, cpu, has_engines))
    return found


def refuse_cpu_engine(config: RunConfig) -> None:
    """ConfigError where a recipe for GPUs is to run here, with vLLM's CPU build, which cannot serve
    its model or its layout. Elsewhere only recipes without GPUs are held to the CPU build's rules.
    """
    if not is_cpu_engine() or _generates_on_cpu(config) or config.num_replicas == 0:
        return
    placement = config.placement.model_copy(update={"gpus_per_node": 0})
    on_cpu = config.model_copy(update={"placement": placement})
    told = {violation.rule for violation in check_plan(config)}  # its model may not be there yet
    found = [violation for violation in check_plan(on_cpu) if violation.rule not in told]
    if found:
        problems = [f"{violation.key}: {violation.message}" for violation in found]
        raise ConfigError(
            "\n  ".join(problems),
            where="the vLLM that is installed here is its CPU build",
            remedy=found[0].remedy or "run it where vLLM's CUDA build is installed",
        )


def _generates_on_cpu(config: RunConfig) -> bool:
    """Whether a recipe has engines, and they run on processors: it has no GPUs."""
    if config.num_replicas == 0:
        return False
    return config.placement.gpus_per_node == 0 and is_cpu_engine()


MODEL_RULES = RuleSet()
"""Their checks take the run and the facts of its model."""


@MODEL_RULES.rule("num_replicas")
def replicas_have_prompts(config: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse more engines than prompts a step."""
    num_prompts = config.batch.num_prompts
    idle = config.num_replicas - num_prompts
    if idle <= 0:
        return None
    return Violation(
        "rollout.num_replicas",
        f"{num_prompts} prompts a step leave {idle} replica(s) without work",
        nearest=(num_prompts,),
        related=("batch.num_prompts",),
    )


@MODEL_RULES.rule("context_length")
def positions_are_known(config: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse sequences longer than the model has positions, whether sampled or read."""
    longest = model.max_position_embeddings
    if not longest or config.rollout.max_model_len <= longest:
        return None
    return Violation(
        "rollout.max_model_len",
        f"the model has positions for {longest} tokens",
        nearest=(longest,),
    )


@MODEL_RULES.rule("routing_experts")
def routing_has_experts(config: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse settings of experts for a dense model."""
    if model.is_moe:
        return []
    off = {"replay": "none", "keep_loss": "none", "balance_weight": 0.0}
    found = []
    for field, value in off.items():
        if getattr(config.routing, field) != value:
            violation = Violation(
                f"routing.{field}",
                f"the model ({model.model_type}) has no experts",
                nearest=(value,),
            )
            found.append(violation)
    if config.objective.router_shift_floor is not None:
        violation = Violation(
            "objective.router_shift_floor",
            f"the model ({model.model_type}) has no routers that could shift",
            nearest=("null",),
            related=("objective.preset",),
        )
        found.append(violation)
    return found


@MODEL_RULES.rule("stacked_files")
def engines_read_stacks_as_they_are_written(
    config: RunConfig, model: ModelFacts
) -> Violation | None:
    """Refuse files where a layer's experts are one tensor of square matrices: transformers reads
    them as they are, and vLLM transposes them (`checkpoints.stacked_experts`)."""
    if config.num_replicas == 0 or config.publish.method != "file":
        return None
    if not family_of(model.model_type).stacked:
        return None
    width = model.moe_intermediate_size
    if model.hidden_size not in (width, 2 * width):
        return None
    return Violation(
        "publish.method",
        f"vLLM would transpose experts of {width} x {model.hidden_size} (moe_intermediate_size, "
        "hidden_size) that files have in one square tensor",
        nearest=("auto",),
    )


@MODEL_RULES.rule("model_mismatch")
def checkpoint_is_of_the_preset(config: RunConfig, model: ModelFacts) -> Violation | None:
    """The first size in which the checkpoint is not what the preset says."""
    preset = config.model.preset
    if config.model.path is None or preset is None:
        return None
    ours = asdict(facts_from_hf(load_preset(preset).hf))
    theirs = asdict(model)
    for field, value in ours.items():
        if theirs[field] != value:
            return Violation(
                "model.path",
                f"{field} of its config.json is {theirs[field]}, of the preset {preset} {value}",
                remedy="set model.preset=null, or name the preset of this checkpoint",
                related=("model.preset",),
            )
    return None


@MODEL_RULES.rule("cpu_head_size")
def cpu_engine_knows_the_head_size(config: RunConfig, model: ModelFacts) -> Violation | None:
    """Latent attention takes any size: `rollout.plugin.cpu_latent_attention`."""
    if not _generates_on_cpu(config) or model.is_mla or model.head_dim in _CPU_HEAD_SIZES:
        return None
    known = ", ".join(map(str, _CPU_HEAD_SIZES))
    return Violation(
        "model.path",
        f"vLLM's CPU build has no attention for heads of {model.head_dim}; it knows {known}",
        remedy="use another model, or a GPU",
    )
