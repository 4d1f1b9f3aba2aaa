"""An objective by name with `key=value` changes, outside of a recipe."""

from collections.abc import Sequence

from grpo_megatron.config.objective import DomainObjective, ObjectiveConfig
from grpo_megatron.config.overrides import apply_overrides
from grpo_megatron.config.presets import preset_names
from grpo_megatron.config.provenance import Layers, Origin
from grpo_megatron.config.validation import valid


def load_objective(preset: str, overrides: Sequence[str] = (), domains: Sequence[str] = ("all",),
                   ) -> tuple[ObjectiveConfig, dict[str, DomainObjective]]:
    """Choices of a preset with changes (`clip_low=0.1`, `domain.math.kl_beta=0.01`).

    Returns:
        The choices, and what each domain sets for itself.

    Raises:
        ConfigError: Everything that is wrong, at once.
    """
    tables = [{"name": name, "source": "file", "path": "case", "objective": {},
               "rewards": [{"function": "case:rewards"}]} for name in domains]
    layers = Layers()
    layers.merge({"name": "objective", "num_steps": 0, "model": {"preset": preset_names()[0]},
                  "domains": tables, "objective": {"preset": preset}},
                 lambda path: Origin("flag", preset))
    problems = apply_overrides(layers, [_full_key(text, domains) for text in overrides])
    config = valid(layers, problems, (), "objective")
    return config.objective, {d.name: d.objective for d in config.domains if d.objective}


def _full_key(text: str, domains: Sequence[str]) -> str:
    for index, name in enumerate(domains):
        if text.startswith(f"domain.{name}."):
            return f"domains.{index}.objective.{text[len(name) + 8:]}"
    return text if text.startswith("objective.") else f"objective.{text}"
