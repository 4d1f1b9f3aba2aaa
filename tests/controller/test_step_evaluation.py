"""What is measured of a process reward model, over domains with other numbers of steps."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from grpo_megatron.config.gates import result_names
from grpo_megatron.controller.step_evaluation import StepEvaluator
from grpo_megatron.data.preferences import Preference, Preferences
from grpo_megatron.data.prompts import Splits
from grpo_megatron.types import Completion, Prompt, Turn
from tests.controller.scored_groups import recipe

LOGITS = {"a": [2.0, -1.0], "b": [3.0, 2.0, -1.0, 1.0, 1.0, 1.0]}
LABELS = {"a": [1.0, 1.0], "b": [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]}


class Scorer:
    async def step_logits(self, preferences):
        return {one.prompt.prompt_id: LOGITS[one.prompt.domain] for one in preferences}


def preference(domain: str) -> Preference:
    labels = LABELS[domain]
    turns = tuple(Turn(2 * n + 1, 2 * n + 2, label) for n, label in enumerate(labels))
    ids = np.zeros(2 * len(labels), np.int32)
    answer = Completion(ids, np.zeros(len(ids), np.float32), (), "stop", "", turns=turns)
    return Preference(Prompt(domain, domain, "", (1,), ""), (answer,), (min(labels),))


def test_all_is_over_steps():
    chosen = [preference("a"), preference("b")]
    by_id = {one.prompt.prompt_id: one for one in chosen}
    splits = Splits({}, (), (), 0)
    evaluator = StepEvaluator(Preferences(splits, by_id, {}), Scorer())
    results = asyncio.run(evaluator.evaluate([one.prompt for one in chosen]))
    assert results["a"]["accuracy"] == 0.5 and results["b"]["accuracy"] == 1
    assert (results["a"]["first_error"], results["b"]["first_error"]) == (0, 1)
    assert results["all"]["steps"] == 8 and results["all"]["prompts"] == 2
    assert results["all"]["accuracy"] == 7 / 8
    assert results["all"]["first_error"] == 0.5
    weighted = (2 * results["a"]["loss"] + 6 * results["b"]["loss"]) / 8
    assert results["all"]["loss"] == pytest.approx(weighted)
    assert "accuracy_low" not in results["all"]
    config = recipe(("a", "b"), kind="reward_model", preferences={"loss": "stepwise"})
    found = {f"eval.{name}.{metric}" for name, values in results.items() for metric in values}
    assert found == {name for name in result_names(config) if name.startswith("eval.")}
