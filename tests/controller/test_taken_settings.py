"""From when on a run's settings are those of its steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_megatron.config.history import settings_of_step
from grpo_megatron.controller import run as run_module
from grpo_megatron.controller.run import Run
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.errors import CheckpointError, DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import SETTINGS_TAKEN, read_events
from grpo_megatron.telemetry.made_with import present_code, recorded_codes
from tests.controller.scored_groups import recipe

AFTER_3 = RunState(step=3, updates=3, sampler={}, heldout_before=0.0, seconds=0.0)


def attempt(run_dir: RunDir) -> Run:
    resources = SimpleNamespace(dispatcher=None, rewards=None, judges=None, preferences=None)
    return Run(recipe(("p",), num_steps=6), run_dir, resources, lambda stopping: None, 0.0)


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    found = RunDir(tmp_path)
    found.create()
    found.step_settings(0).parent.mkdir()
    found.step_settings(0).write_text("old")
    found.config.write_text("new")
    return found


def test_a_run_that_goes_on_records_its_settings_before_it_trains(run_dir, monkeypatch):
    async def trained() -> RunState:
        assert settings_of_step(run_dir, 3).read_text() == "new"
        return AFTER_3

    loop = SimpleNamespace(run=trained, phase_seconds=Counter())
    monkeypatch.setattr(run_module, "make_rl_loop", lambda *_, **__: loop)
    asyncio.run(attempt(run_dir)._train(AFTER_3))
    assert settings_of_step(run_dir, 2).read_text() == "old"
    [event] = read_events(run_dir.events)
    assert (event["kind"], event["step"]) == (SETTINGS_TAKEN, 3)


def test_an_attempt_tells_the_seconds_of_its_own_steps(run_dir, monkeypatch):
    told = []

    async def trained() -> RunState:
        return replace(AFTER_3, step=5)

    loop = SimpleNamespace(run=trained, phase_seconds=Counter(train=4.0))
    monkeypatch.setattr(run_module, "make_rl_loop", lambda *_, **__: loop)
    monkeypatch.setattr(run_module, "show", lambda kind, text: told.append(text))
    asyncio.run(attempt(run_dir)._train(AFTER_3))
    assert told == ["seconds by phase of 2 steps: train 4"]


def test_settings_that_the_sampler_refuses_are_not_taken(run_dir, monkeypatch):
    def refuse(*_, **__):
        raise DataError("the checkpoint's sampler does not fit this run")

    monkeypatch.setattr(run_module, "make_rl_loop", refuse)
    with pytest.raises(DataError):
        asyncio.run(attempt(run_dir)._train(AFTER_3))
    assert read_events(run_dir.events) == []
    assert settings_of_step(run_dir, 3).read_text() == "old"


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_that_trains_further_has_no_result(run_dir, monkeypatch, step):
    """One that only ends again, without a step, keeps it."""
    run_dir.result.write_text("of an earlier end")
    state = replace(AFTER_3, step=step)

    async def trained() -> RunState:
        assert run_dir.result.exists() == (step == 6)
        return state

    loop = SimpleNamespace(run=trained, phase_seconds=Counter())
    monkeypatch.setattr(run_module, "make_rl_loop", lambda *_, **__: loop)
    asyncio.run(attempt(run_dir)._train(state))
    kept = run_dir.earlier_result if step == 3 else run_dir.result
    assert kept.read_text() == "of an earlier end"


def test_an_attempt_records_its_code_once_its_checkpoint_is_loaded(run_dir, monkeypatch):
    async def is_damaged(self):
        raise CheckpointError("all checkpoints are damaged")

    async def is_loaded(self):
        return AFTER_3

    async def refuse(self, state):
        raise DataError("the checkpoint's sampler does not fit this run")

    monkeypatch.setattr(Run, "_train", refuse)
    monkeypatch.setattr(Run, "_restore", is_damaged)
    with pytest.raises(CheckpointError):
        asyncio.run(attempt(run_dir).run())
    assert recorded_codes(run_dir.events) == []
    monkeypatch.setattr(Run, "_restore", is_loaded)
    for _ in range(2):
        with pytest.raises(DataError):
            asyncio.run(attempt(run_dir).run())
    assert recorded_codes(run_dir.events) == [present_code()]
