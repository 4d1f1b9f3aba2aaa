"""Seconds of a run count all of its attempts, and never shrink."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from grpo_megatron.config.evaluated_share import EvaluatedShare
from grpo_megatron.controller import run as run_module
from grpo_megatron.controller.run import Run
from grpo_megatron.controller.run_clock import RunClock, seconds_at_end
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.errors import GateError
from grpo_megatron.rundir import RunDir
from tests.controller.scored_groups import recipe

AFTER_6 = RunState(step=6, updates=6, sampler={}, heldout_before=0.0, seconds=100.0)
START_S = 20.0
"""Since the attempt began, when it has loaded its checkpoint."""


class Trainer:
    async def call(self, request: object) -> dict:
        return asdict(AFTER_6)


class Publisher:
    async def publish(self, version: int) -> None:
        pass


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    found = RunDir(tmp_path)
    found.create()
    return found


def resumed(run_dir: RunDir, monkeypatch) -> Run:
    """An attempt that began `START_S` ago and has loaded the checkpoint of step 6."""

    async def newest(trainer, checkpoints, events):
        return run_dir.step_checkpoint(6)

    monkeypatch.setattr(run_module, "newest_whole", newest)
    monkeypatch.setattr(run_module, "drop_disconnected", lambda store, step: None)
    resources = SimpleNamespace(
        dispatcher=None, rewards=None, judges=None, trainer=Trainer(), publisher=Publisher()
    )
    started = time.monotonic() - START_S
    attempt = Run(recipe(("p",), num_steps=6), run_dir, resources, lambda _: None, started)
    assert asyncio.run(attempt._restore()) is not None
    return attempt


def test_a_resumed_attempt_counts_its_start(run_dir, monkeypatch):
    attempt = resumed(run_dir, monkeypatch)
    assert attempt.clock.seconds >= AFTER_6.seconds + START_S


@pytest.mark.parametrize("name", ["result", "earlier_result"])
def test_an_end_after_the_checkpoint_counts(run_dir, monkeypatch, name):
    getattr(run_dir, name).write_text(json.dumps({"seconds": 130.0}))
    attempt = resumed(run_dir, monkeypatch)
    first = attempt.clock.seconds
    assert first >= 130.0 + START_S
    attempt._conclude(AFTER_6, {"all": {}}, {}, attempt.clock.seconds)
    result = json.loads(run_dir.result.read_text())
    assert result["seconds"] >= first
    again = resumed(run_dir, monkeypatch)
    assert again.clock.seconds >= result["seconds"] + START_S


@pytest.mark.parametrize(
    ("before", "results", "told"),
    [
        (0.3, {"accuracy": 0.5}, "held-out accuracy before 0.30 after 0.50 in 7 s"),
        (math.nan, {}, "nothing was held out; finished in 7 s"),
        (math.nan, {"accuracy": 0.5}, "held-out accuracy 0.50 in 7 s"),
        (
            0.3,
            {"prompts": 8.0, "accuracy": 0.5, "accuracy_unscorable": 2.0},
            "held-out accuracy before 0.30 after 0.50 (2 of 8 prompts could not be scored) in 7 s",
        ),
        (
            0.3,
            {"prompts": 8.0, "accuracy_unscorable": 8.0},
            "held-out accuracy before 0.30 after unknown "
            "(unreliable: 8 of 8 prompts could not be scored) in 7 s",
        ),
    ],
)
def test_an_end_tells_what_was_measured(run_dir, monkeypatch, before, results, told):
    shown = {}
    monkeypatch.setattr(run_module, "show", lambda kind, text: shown.update({kind: text}))
    attempt = resumed(run_dir, monkeypatch)
    state = replace(AFTER_6, heldout_before=before)
    attempt._conclude(state, {"all": results}, {}, 7.0)
    assert shown["result"] == told
    for file in (run_dir.result, run_dir.events):
        assert "NaN" not in file.read_text()


def test_the_result_has_what_could_not_be_scored_before(run_dir, monkeypatch):
    attempt = resumed(run_dir, monkeypatch)
    told = []

    async def greedy_accuracy(prompts) -> EvaluatedShare:
        return EvaluatedShare(0.5, 8, 2)

    monkeypatch.setattr(run_module, "show", lambda kind, text: told.append(text))
    attempt.evaluator = SimpleNamespace(greedy_accuracy=greedy_accuracy)
    attempt.resources.splits = SimpleNamespace(heldout=[None] * 8)
    attempt.resources.publisher = Publisher()
    state = asyncio.run(attempt._begin())
    assert told[-1] == (
        "held-out accuracy before training 0.500 (2 of 8 prompts could not be scored)"
    )
    state = RunState(**json.loads(json.dumps(asdict(state))))
    attempt._conclude(state, {"all": {}}, {}, 7.0)
    result = json.loads(run_dir.result.read_text())
    assert result["before"] == 0.5 and result["before_unscorable"] == 2


@pytest.mark.parametrize("kind", ["rl", "eval"])
def test_a_closed_gate_names_what_the_run_has_left(run_dir, monkeypatch, kind):
    """An evaluation has no weights to look at."""
    attempt = resumed(run_dir, monkeypatch)
    attempt.config = recipe(kind=kind, gates=["eval.all.accuracy >= 0.5"])
    results = {"all": {"prompts": 8.0, "accuracy": 0.25}}
    with pytest.raises(GateError, match=r"seen: 0.25") as error:
        attempt._conclude(AFTER_6, results, {}, 7.0)
    assert (str(run_dir.export) in error.value.remedy) == (kind == "rl")
    assert (str(run_dir.result) in error.value.remedy) == (kind == "eval")


def test_the_loop_goes_on_with_the_seconds_of_the_run(run_dir, monkeypatch):
    seen = []

    class Stop(Exception):
        pass

    def make(config, run_dir, state, *_, **__):
        seen.append(state.seconds)
        raise Stop

    attempt = resumed(run_dir, monkeypatch)
    monkeypatch.setattr(run_module, "make_rl_loop", make)
    with pytest.raises(Stop):
        asyncio.run(attempt._train(AFTER_6))
    assert seen[0] >= AFTER_6.seconds + START_S


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"seconds": null}'])
def test_a_result_that_cannot_be_read_has_no_seconds(run_dir, text):
    run_dir.result.write_text(text)
    assert seconds_at_end(run_dir) == 0.0


def test_less_of_earlier_attempts_than_is_known_changes_nothing():
    clock = RunClock(time.monotonic(), earlier=50.0)
    clock.count_earlier(40.0)
    assert clock.seconds >= 50.0
