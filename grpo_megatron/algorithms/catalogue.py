"""Every preset explained from the registry: `objective show` and docs/objectives.md.

    python -m grpo_megatron.algorithms.catalogue > docs/objectives.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from grpo_megatron.algorithms.advantages.after import SHAPINGS
from grpo_megatron.algorithms.advantages.before import REWARD_SHAPINGS, SUBSETS
from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS
from grpo_megatron.algorithms.aggregation import AGGREGATIONS
from grpo_megatron.algorithms.clips import CLIPS
from grpo_megatron.algorithms.kl import KL
from grpo_megatron.algorithms.off_policy import MISMATCH
from grpo_megatron.algorithms.ratios import RATIOS
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.objective_presets import PRESETS

AXES: dict[str, Registry] = {
    "reward_shaping": REWARD_SHAPINGS, "subset": SUBSETS, "advantage": ESTIMATORS,
    "shaping": SHAPINGS, "ratio": RATIOS, "clip": CLIPS, "aggregation": AGGREGATIONS, "kl": KL,
    "mismatch": MISMATCH}
"""Choices whose functions are registered; `none` needs no function."""

_HEAD = """# Objectives

An objective is a product of independent choices: reward shaping × subset × advantage × shaping ×
ratio × clip × aggregation × KL × mismatch correction × off-policy mask. A preset is a fixed
combination with the values of its paper; every choice can be set on top of it
(`objective.clip_high=0.3`), and combinations that are wrong are refused with the reason.

The loss of an optimizer step is `-Σ w_i · factor · term + β · KL - entropy_weight · H + …`, over
the policy tokens of all ranks and micro-batches. The weights `w_i` hold global denominators that
are fixed before the first micro-batch, so neither the split nor the layout changes the result.
Denominators count every trained sample, also where a mask rejects it; truncated samples
(`overlong`) and samples outside of the subset are left out before counting.

Statistics over the batch (`batch_raw`, `batch_residual`, `whiten`, the leading groups of
`length_switch`, the quartiles of `adaptive`, OPSM's threshold) are taken per domain; with
`statistics_scope = "global"` domains influence each other. Clip distances, `kl_beta`,
`entropy_weight`, `opsm_delta` (`[domains.objective]`) and the reference (`domains.reference`) can
be set per domain and hold for its samples.

What differs from other libraries on purpose is in [differences.md](differences.md).

Evidence: **S** strong (frontier use or several independent replications with ablations),
**M** moderate, **E** emerging (one paper). This file is generated from the registry:
`python -m grpo_megatron.algorithms.catalogue > docs/objectives.md`.
"""


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
        for choice, function in registry.functions.items():
            parts += [f'<a id="{axis}-{choice}"></a>', f"**`{choice}`** {_formula(function)}\n"]
    parts += ["### Settings\n", "| key | default | meaning |", "|---|---|---|"]
    parts += [f"| `{key}` | `{_toml(field.default)}` | {_sentence(field.description)} |"
              for key, field in ObjectiveConfig.model_fields.items()]
    return "\n".join(parts)


def _choices(config: ObjectiveConfig) -> Iterator[tuple[str, Callable]]:
    for axis, registry in AXES.items():
        function = registry.functions.get(getattr(config, axis))
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
