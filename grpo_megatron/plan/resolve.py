"""Load a recipe with every rule applied: those of the schema, the model and the machine."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from grpo_megatron.config.loader import ResolvedConfig, load_recipe, read_resolved
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.problems import Conditions, Details, Violation, broken
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.plan.layout import Case, check_layout
from grpo_megatron.plan.layout_rules import is_cpu_engine
from grpo_megatron.plan.model_facts import ModelFacts, facts_from_hf, model_facts

# vLLM 0.32.0, v1/attention/backends/cpu_attn.py; with another the first request ends the engine
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def resolve(recipe: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read, override and validate a recipe; ConfigError with everything that is wrong."""
    return load_recipe(recipe, overrides, checks=(check_plan,))


def resolve_run(path: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """The same for a run's stored configuration, with more overrides on top."""
    return read_resolved(path, overrides, checks=(check_plan,))


def refuse_missing(config: RunConfig, *, coming: bool = False) -> None:
    """DataError for the first input of `config` that does not exist. `coming`: one whose directory
    holds a run's config.json will do, because a submitted run is to write it."""
    for path in config.input_paths:
        if not path.exists() and not (coming and (path.parent / "config.json").exists()):
            raise DataError("no such file or directory", where=str(path.absolute()),
                            remedy="paths are relative to the directory the command runs in")


def check_plan(config: RunConfig) -> list[Violation]:
    model = config.model
    if model.preset not in (None, *preset_names()) or not (model.path or model.preset):
        return []  # told by the constraints of the schema
    try:
        facts = model_facts(model)
    except ConfigError as error:
        key = "model.preset" if model.path is None else "model.path"
        return [Violation("model_unreadable", key, str(model.preset or model.path),
                          f"{error.message} ({error.where})", remedy=error.remedy or "")]
    return [*broken(_RULES, {"c": config, "f": facts}, config, facts),
            *check_layout(Case(config.trainer, facts, config.rollout))]


def _other_model(c: RunConfig, facts: ModelFacts) -> Details | None:
    """The first size in which the checkpoint is not what the preset says."""
    if c.model.path is None or c.model.preset is None:
        return None
    ours, theirs = asdict(facts_from_hf(load_preset(c.model.preset).hf)), asdict(facts)
    return next(({"field": name, "ours": ours[name], "theirs": theirs[name]}
                 for name in ours if ours[name] != theirs[name]), None)


def _routing_without_experts(c: RunConfig, facts: ModelFacts) -> list[Details]:
    off = {"replay": "none", "keep_loss": "none", "balance_weight": 0.0}
    return [{"field": field, "nearest": [value]} for field, value in off.items()
            if getattr(c.routing, field) != value and not facts.is_moe]


def _cpu_head_size(c: RunConfig, facts: ModelFacts) -> Details | None:
    """Latent attention takes any size: `rollout.plugin.cpu_latent_attention`."""
    if not is_cpu_engine() or facts.is_mla or facts.head_dim in _CPU_HEAD_SIZES:
        return None
    return {"sizes": ", ".join(map(str, _CPU_HEAD_SIZES))}


_RULES: Conditions = {
    "cpu_head_size": _cpu_head_size,
    "num_replicas": lambda c, facts: c.rollout.num_replicas > c.batch.num_prompts and {
        "idle": c.rollout.num_replicas - c.batch.num_prompts},
    "routing_experts": _routing_without_experts, "model_mismatch": _other_model}
