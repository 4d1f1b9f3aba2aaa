"""Named objectives: fixed combinations of choices, with the values of their papers."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.config.objective import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class Choices:
    """One value for every axis."""

    advantage_std: str
    ratio: str
    clip_low: float
    clip_high: float
    aggregation: str


PRESETS = {
    # arXiv:2507.18071: clip range 3e-4 / 4e-4 on the length-normalised sequence ratio
    "gspo": Choices("group", "sequence_geo", 3e-4, 4e-4, "seq_mean_token_mean"),
    # arXiv:2402.03300
    "grpo": Choices("group", "token", 0.2, 0.2, "seq_mean_token_mean"),
}


def resolve_choices(config: ObjectiveConfig) -> Choices:
    """The preset's choices, with those that the recipe sets itself."""
    preset = PRESETS[config.preset]
    own = {name: getattr(config, name) for name in Choices.__slots__}
    return Choices(**{name: getattr(preset, name) if value is None else value
                      for name, value in own.items()})
