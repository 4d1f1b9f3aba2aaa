"""Load a recipe with every rule applied: those of the schema, the model and the machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config.loader import load_recipe, read_resolved
from grpo_megatron.config.presets import preset_names
from grpo_megatron.config.problems import Violation
from grpo_megatron.config.resolved import ResolvedConfig
from grpo_megatron.config.rules import Conditions, broken
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.layout import check_layout
from grpo_megatron.plan.machine import installed_engines
from grpo_megatron.plan.model_facts import ModelFacts, model_facts


def resolve(recipe: str | Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read, override and validate a recipe; ConfigError with everything that is wrong."""
    return load_recipe(recipe, overrides, checks=(check_plan,))


def resolve_run(path: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """The same for a run's stored configuration, with more overrides on top."""
    return read_resolved(path, overrides, checks=(check_plan,))


def check_plan(config: RunConfig) -> list[Violation]:
    """Rules between the configuration, its model and the installed engines."""
    model = config.model
    known_source = model.path is not None or model.preset in preset_names()
    if not known_source or (model.path is not None and model.preset is not None):
        return []  # told by the constraints of the schema
    try:
        facts = model_facts(model)
    except ConfigError as error:
        key = "model.preset" if model.path is None else "model.path"
        return [Violation("model_unreadable", key, str(model.preset or model.path),
                          f"{error.message} ({error.where})", remedy=error.remedy or "")]
    return [*broken(_RULES, {"c": config, "f": facts}, config, facts),
            *check_layout(config.trainer, config.rollout, facts, installed_engines())]


def _routing_without_experts(c: RunConfig, facts: ModelFacts) -> list[dict[str, Any]]:
    off = {"replay": "none", "keep_loss": "none", "balance_weight": 0.0}
    return [{"field": field, "nearest": [value]} for field, value in off.items()
            if getattr(c.routing, field) != value and not facts.is_moe]


_RULES: Conditions = {
    "num_replicas": lambda c, facts: c.rollout.num_replicas > c.batch.num_prompts and {
        "idle": c.rollout.num_replicas - c.batch.num_prompts},
    "routing_experts": _routing_without_experts,
}
