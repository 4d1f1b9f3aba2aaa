"""Every preset explained from the registry: `objective show` and docs/objectives.md.

    python -m grpo_megatron.algorithms.catalogue > docs/objectives.md
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.algorithms.advantages.after import SHAPINGS
from grpo_megatron.algorithms.advantages.before import REWARD_SHAPINGS, SUBSETS
from grpo_megatron.algorithms.advantages.pipeline import ESTIMATORS
from grpo_megatron.algorithms.aggregation import AGGREGATIONS
from grpo_megatron.algorithms.clips import CLIPS
from grpo_megatron.algorithms.off_policy import MISMATCH
from grpo_megatron.algorithms.ratios import RATIOS
from grpo_megatron.algorithms.regularisers import KL
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.objective_presets import PRESETS

AXES: dict[str, dict[str, Callable]] = {
    "reward_shaping": REWARD_SHAPINGS, "subset": SUBSETS, "advantage": ESTIMATORS,
    "shaping": SHAPINGS, "ratio": RATIOS, "clip": CLIPS, "aggregation": AGGREGATIONS, "kl": KL,
    "mismatch": MISMATCH}
"""Choices whose functions are registered; `none` needs no function."""

_HEAD = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")


def describe(name: str) -> str:
    """Title, source, evidence, use, choices with formulas, and defaults of one preset."""
    preset, config = PRESETS[name], ObjectiveConfig(preset=name)
    lines = [f"{name}: {preset.title}", "", f"source    {preset.source}",
             f"evidence  {preset.evidence}", f"use       {preset.use}"]
    if preset.group_size:
        lines.append(f"groups    of {preset.group_size}")
    if preset.with_data:
        lines.append("combine   " + ", ".join(f"{k}={v}" for k, v in preset.with_data.items()))
    lines += ["", "formula"]
    for axis, function in _choices(config):
        lines.append(f"  {axis} = {getattr(config, axis)}")
        lines += [f"      {line}" for line in _formula(function).splitlines()]
    lines += ["", "values (other than the defaults)"]
    lines += [f"  {key} = {value}" for key, value in sorted(preset.values.items())]
    return "\n".join(lines)


def markdown() -> str:
    """docs/objectives.md."""
    parts = [_HEAD, "\n## Presets\n", "| preset | what | evidence | source | when |",
             "|---|---|---|---|---|"]
    parts += [f"| [`{name}`](#{name}) | {p.title} | {p.evidence} | {p.source} | {p.use} |"
              for name, p in PRESETS.items()]
    for name, preset in PRESETS.items():
        config = ObjectiveConfig(preset=name)
        parts += [f"\n### {name}\n", f"{preset.title} ({preset.source}, evidence "
                  f"{preset.evidence}). When: {preset.use}.\n"]
        parts += [f"- {axis}: [`{getattr(config, axis)}`](#{axis}-{getattr(config, axis)})"
                  for axis, _ in _choices(config)]
        values = ", ".join(f"`{k}={_toml(v)}`" for k, v in sorted(preset.values.items()))
        parts.append(f"- values: {values or 'the defaults'}")
        if preset.with_data:
            more = ", ".join(f"`{k}={v}`" for k, v in preset.with_data.items())
            parts.append(f"- the paper combines it with: {more}")
    parts.append("\n## Choices")
    for axis, registry in AXES.items():
        parts.append(f"\n### {axis}\n")
        for choice, function in registry.items():
            parts += [f'<a id="{axis}-{choice}"></a>', f"**`{choice}`** {_formula(function)}\n"]
    parts += ["### Settings\n", "| key | default | meaning |", "|---|---|---|"]
    parts += [f"| `{key}` | `{_toml(field.default)}` | {_sentence(field.description)} |"
              for key, field in ObjectiveConfig.model_fields.items()]
    return "\n".join(parts)


def _choices(config: ObjectiveConfig) -> Iterator[tuple[str, Callable]]:
    for axis, registry in AXES.items():
        function = registry.get(getattr(config, axis))
        if function is not None:
            yield axis, function


def _formula(function: Callable) -> str:
    text = inspect.cleandoc(function.__doc__ or "")
    return text.partition("\n\nArgs:")[0]


def _toml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "true", False: "false"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(markdown())
