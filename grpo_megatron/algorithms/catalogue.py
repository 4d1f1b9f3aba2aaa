"""Every preset explained from the registry: `objective show` and docs/objectives.md.

python -m grpo_megatron.algorithms.catalogue > docs/objectives.md"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2

from grpo_megatron.algorithms.advantages.after import SHAPINGS
from grpo_megatron.algorithms.advantages.before import (
    GROUP_SUBSETS,
    REWARD_SHAPINGS,
    adaptive_subset,
)
from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS
from grpo_megatron.algorithms.aggregation import AGGREGATIONS
from grpo_megatron.algorithms.objective import CREDITS, OFF_POLICY_MASKS
from grpo_megatron.algorithms.ratios import MISMATCH, RATIOS
from grpo_megatron.algorithms.terms import CLIPS, KL
from grpo_megatron.config.objective import PRESETS, ObjectiveConfig
from grpo_megatron.config.problems import as_toml

AXES: dict[str, dict[str, Callable[..., Any]]] = {
    "reward_shaping": REWARD_SHAPINGS,
    "subset": {**GROUP_SUBSETS, "adaptive": adaptive_subset},
    "advantage": ESTIMATORS,
    "shaping": SHAPINGS,
    "ratio": RATIOS,
    "clip": CLIPS,
    "credit": CREDITS,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "mismatch": MISMATCH,
    "off_policy_mask": OFF_POLICY_MASKS,
}
"""Choices whose functions are registered; `none` needs no function."""


def describe(name: str) -> str:
    """Title, source, evidence, use, choices with formulas, and defaults of one preset."""
    return _rendered("catalogue.txt", name=name, preset=PRESETS[name])


def markdown() -> str:
    """docs/objectives.md."""
    return _rendered("catalogue.md")


def _rendered(template: str, **known: Any) -> str:
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return (
        jinja2.Environment(undefined=jinja2.StrictUndefined)
        .from_string(text)
        .render(
            presets=PRESETS,
            axes=AXES,
            settings=ObjectiveConfig.model_fields,
            choices=_choices,
            formula=inspect.getdoc,
            toml=as_toml,
            **known,
        )
    )


def _choices(preset: str) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    config = ObjectiveConfig(preset=preset)
    for axis, functions in AXES.items():
        choice = getattr(config, axis)
        if choice in functions:
            yield axis, choice, functions[choice]


if __name__ == "__main__":
    print(markdown())
