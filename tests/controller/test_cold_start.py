"""A cold start ends by an accuracy that is known, not by the lack of one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from grpo_megatron.config.evaluated_share import EvaluatedShare
from grpo_megatron.controller import cold_start as cold_start_module
from grpo_megatron.controller.cold_start import ColdStart
from grpo_megatron.controller.display import Phases
from grpo_megatron.controller.run_clock import RunClock
from grpo_megatron.errors import TrainerError
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events
from tests.controller.scored_groups import prompt_of, recipe

NOTHING_SCORED = EvaluatedShare(math.nan, 8, 8)
FEW_SCORED = EvaluatedShare(1.0, 8, 5)
BELOW = EvaluatedShare(0.4, 8)
REACHED = EvaluatedShare(0.5, 8, 4)


class Parts:
    """In the place of trainer, publisher and evaluator: every evaluation has the next result."""

    def __init__(self, results: Sequence[EvaluatedShare]):
        self.left = list(results)

    async def call(self, request: object) -> None:
        pass

    async def publish(self, version: int) -> None:
        pass

    async def greedy_accuracy(self, prompts: Sequence) -> EvaluatedShare:
        return self.left.pop(0)


def ended(tmp_path, monkeypatch, results: Sequence[EvaluatedShare]) -> int:
    """Return the steps of a cold start that is evaluated so; its training is counted only."""

    async def trained(self: ColdStart, demonstrations: object, num_steps: int) -> None:
        self._steps += num_steps

    monkeypatch.setattr(cold_start_module, "demonstrated", lambda config, tokenizer, train: train)
    monkeypatch.setattr(ColdStart, "_train", trained)
    settings = {"target_accuracy": 0.5, "steps_per_evaluation": 10, "max_steps": 30}
    config = recipe(cold_start={**settings, "batch_size": 1})
    run_dir = RunDir(tmp_path)
    run_dir.create()
    parts = Parts(results)
    cold_start = ColdStart(
        config,
        config.cold_start,
        run_dir,
        RunClock(0.0),
        tokenizer=None,
        splits=SimpleNamespace(train={"d": [prompt_of("p")]}, validation=[prompt_of("v")]),
        trainer=parts,
        publisher=parts,
        judges=EngineControl([]),
        evaluator=parts,
        phases=Phases(),
        stopping=asyncio.Event(),
    )
    assert asyncio.run(cold_start._run(None))
    assert parts.left == []
    [event] = [event for event in read_events(run_dir.events) if event["kind"] == "cold_start_done"]
    assert event["accuracy"] == results[-1].value
    return event["steps"]


def test_it_ends_where_enough_prompts_could_be_scored(tmp_path, monkeypatch):
    assert ended(tmp_path, monkeypatch, [NOTHING_SCORED, FEW_SCORED, REACHED]) == 21


def test_it_looks_often_near_the_target(tmp_path, monkeypatch):
    assert ended(tmp_path, monkeypatch, [BELOW, BELOW, REACHED]) == 12


def test_one_that_cannot_end_says_what_could_not_be_scored(tmp_path, monkeypatch):
    with pytest.raises(TrainerError, match="8 of 8 prompts could not be scored"):
        ended(tmp_path, monkeypatch, [NOTHING_SCORED] * 4)
