"""The schema, the registries, the presets and the documentation name the same things."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from grpo_megatron.algorithms.catalogue import AXES, describe, markdown
from grpo_megatron.algorithms.registry import Registry
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import OF_TURNS, PRESETS, ObjectiveConfig
from tests.trainer.test_objective_parity import OBJECTIVES

HANDLED_ELSEWHERE = {"kl": {"none", "k1", "reward_k1"}}


@pytest.mark.parametrize("axis", AXES)
def test_every_choice_is_a_registered_function(axis):
    allowed = set(get_args(ObjectiveConfig.model_fields[axis].annotation))
    assert allowed - HANDLED_ELSEWHERE.get(axis, {"none"}) == set(AXES[axis]) - {"none"}
    for function in AXES[axis].values():
        assert function.__doc__


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_legal_and_explained(name):
    config, _ = load_objective(name)
    assert all(getattr(config, key) == value for key, value in PRESETS[name].values.items())
    assert PRESETS[name].source in describe(name)


def test_the_documentation_is_generated():
    """Remedy: python -m grpo_megatron.algorithms.catalogue > docs/objectives.md"""
    path = Path(__file__).parents[2] / "docs" / "objectives.md"
    assert path.read_text(encoding="utf-8") == markdown() + "\n"


@pytest.mark.parametrize("axis", ["ratio", "clip", "credit", "kl", "off_policy_mask"])
def test_every_choice_of_the_loss_is_trained_at_several_layouts(axis):
    """Remedy: a preset with it, or an entry of EXTRA in tests/trainer/test_objective_parity.py."""
    trained = {getattr(ObjectiveConfig(**settings), axis) for settings in OBJECTIVES.values()}
    of_turns = {getattr(ObjectiveConfig(preset=name), axis) for name in OF_TURNS}
    assert set(AXES[axis]) - trained - of_turns - {"none"} == set()


def test_a_name_is_registered_once():
    registry = Registry()
    registry.register("none")(len)
    with pytest.raises(ValueError, match="none is registered twice"):
        registry.register("none")(sum)
    assert registry == {"none": len}
