"""What is measured of preferences that are not trained, and the files of the reference's scores."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithms.preferences import kto_baseline, kto_loss
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.preference_steps import (
    PreferenceEvaluator,
    ReferenceScores,
    Scores,
    answer_ends,
)
from grpo_megatron.data.dataset_answers import unsampled
from grpo_megatron.data.preferences import Preference, Preferences
from grpo_megatron.data.prompts import Splits
from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Prompt
from tests.data.preference_files import recipe


class StubScorer:
    """Gives scores by id, and keeps the ids that it was asked for, and whether adapters counted."""

    def __init__(self, scores: Scores):
        self._scores = scores
        self.asked: list[str] = []
        self.with_adapters: list[bool] = []

    async def scores(self, preferences, *, with_adapters=True) -> Scores:
        found = {}
        self.with_adapters.append(with_adapters)
        for one in preferences:
            self.asked.append(one.prompt.prompt_id)
            found[one.prompt.prompt_id] = self._scores[one.prompt.prompt_id]
        return found


def preference(name: str, label: float) -> Preference:
    answer = unsampled([5, 6], 0, "stop", "x")
    return Preference(Prompt(name, "d", name, (4,), ""), (answer, answer), (label, math.nan))


# --- what is measured


weights = st.floats(0.1, 3.0)


@given(desirable=weights, undesirable=weights)
def test_the_loss_of_labelled_answers_is_the_one_that_is_trained(desirable, undesirable):
    """With the weights of both labels."""
    settings = {"loss": "kto", "beta": 0.7}
    settings |= {"desirable_weight": desirable, "undesirable_weight": undesirable}
    config = recipe("x", preferences=settings)
    scores = {"a": (-1.0, 0.3), "b": (-2.0, 0.1), "c": (0.5, 0.2)}
    members = [preference("a", 1.0), preference("b", 0.0), preference("c", 0.0)]
    by_id = {one.prompt.prompt_id: one for one in members}
    preferences = Preferences(Splits({}, (), (), 0), by_id, {})
    evaluator = PreferenceEvaluator(config, preferences, {}, StubScorer(scores))
    results = asyncio.run(evaluator.evaluate([one.prompt for one in members]))
    first, second = torch.tensor(list(scores.values()), dtype=torch.float64).unbind(1)
    labels = torch.tensor([True, False, False])
    losses = kto_loss(first, labels, kto_baseline(second), 0.7, desirable, undesirable)
    assert results["d"]["loss"] == pytest.approx(float(losses.mean()), rel=1e-12)


def test_where_whole_answers_are_read():
    answers = (unsampled([5, 6], 0, "stop", "x"), unsampled([6, 7], 0, "stop", "x"))
    one = Preference(Prompt("a", "d", "a", (4,), ""), answers, (1.0, 0.0))
    preferences = Preferences(Splits({}, (), (), 0), {"a": one}, {})
    assert answer_ends(preferences, SimpleNamespace(eos_token_id=2)) == [2, 6, 7]


# --- the reference's scores


KNOWN: Scores = {"a": (-1.5, -2.25), "b": (-0.1, -math.pi), "c": (float(np.float32(-0.3)), 0.0)}


def load(run_dir: RunDir, names: str, config: RunConfig | None = None) -> tuple[Scores, list[str]]:
    """The scores of these preferences, and the ids of those that had to be computed."""
    scorer = StubScorer(KNOWN)
    scores = ReferenceScores(config or recipe("x"), run_dir, scorer, None)
    found = asyncio.run(scores.load([preference(name, 1.0) for name in names]))
    return found, scorer.asked


def files_of(run_dir: RunDir) -> list[Path]:
    return sorted(run_dir.reference.iterdir())


def test_scores_are_computed_once(tmp_path):
    run_dir = RunDir(tmp_path)
    assert load(run_dir, "ab") == ({name: KNOWN[name] for name in "ab"}, ["a", "b"])
    assert load(run_dir, "abc") == (KNOWN, ["c"])
    assert load(run_dir, "abc") == (KNOWN, [])


class StubTrainer:
    """Keeps the checkpoints whose weights it was told to take."""

    def __init__(self):
        self.taken: list[Path] = []

    async def call(self, request) -> None:
        self.taken.append(request.directory)


@pytest.mark.parametrize("is_named", [False, True])
def test_only_the_model_that_the_run_begins_with_has_adapters(tmp_path, is_named):
    """They would change what another checkpoint computes."""
    changes = {"lora": {"rank": 2, "dora": True}}
    if is_named:
        changes["preferences"] = {"reference": str(tmp_path)}
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    scorer = StubScorer(KNOWN)
    trainer = StubTrainer()
    scores = ReferenceScores(recipe("x", **changes), run_dir, scorer, trainer)
    assert asyncio.run(scores.load([preference("a", 1.0)])) == {"a": KNOWN["a"]}
    assert scorer.with_adapters == [not is_named]
    taken = [tmp_path, run_dir.model] if is_named else []
    assert trainer.taken == taken


def test_the_reference_has_the_adapters_with_which_the_run_began(tmp_path):
    """Which a trainer that goes on with a checkpoint has not read."""
    adapters = tmp_path / "adapters"
    config = recipe("x", lora={"rank": 2, "path": str(adapters)})
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    trainer = StubTrainer()
    scores = ReferenceScores(config, run_dir, StubScorer(KNOWN), trainer)
    with pytest.raises(DataError, match=r"lora\.path is gone, and 1 preferences have no log-probs"):
        asyncio.run(scores.load([preference("a", 1.0)]))
    adapters.mkdir()
    asyncio.run(scores.load([preference("a", 1.0)]))
    assert trainer.taken == [adapters]
    adapters.rmdir()
    assert asyncio.run(scores.load([preference("a", 1.0)])) == {"a": KNOWN["a"]}


@pytest.mark.parametrize(
    ("reference", "is_same"),
    [(None, True), ("other", False), ("model", True), ("folder/../model", True)],
)
def test_when_the_weights_begin_as_the_reference(reference, is_same):
    changes = {"model": {"path": "model"}, "preferences": {"reference": reference}}
    assert recipe("x", **changes).begins_as_reference == is_same


def test_files_of_older_runs_have_no_digest(tmp_path):
    run_dir = RunDir(tmp_path)
    load(run_dir, "abc")
    [file] = files_of(run_dir)
    values = json.loads(file.read_text())
    del values["sha256"]
    file.write_text(json.dumps(values))
    assert load(run_dir, "abc") == (KNOWN, [])


DAMAGES = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a digit": lambda text: text.replace("2.25", "2.75"),
    "a list": lambda text: "[]",
    "no scores": lambda text: json.dumps({"model": json.loads(text)["model"]}),
    "scores are a list": lambda text: json.dumps(json.loads(text) | {"scores": [1]}),
    "one score": lambda text: json.dumps(json.loads(text) | {"scores": {"a": [1.0]}}),
    "a text": lambda text: json.dumps(json.loads(text) | {"scores": {"a": [None, 1.0]}}),
    "no digest": lambda text: json.dumps(json.loads(text) | {"sha256": None}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_told_and_may_be_removed(tmp_path, name):
    run_dir = RunDir(tmp_path)
    load(run_dir, "ab")
    load(run_dir, "abc")
    first, second = files_of(run_dir)
    first.write_text(DAMAGES[name](first.read_text()))
    with pytest.raises(DataError, match="log-probs cannot be read") as error:
        load(run_dir, "abc")
    assert error.value.where == str(first) and "remove it" in str(error.value.remedy)
    kept = second.read_bytes()
    first.unlink()
    assert load(run_dir, "abc") == (KNOWN, ["a", "b"])
    assert second.read_bytes() == kept
    assert load(run_dir, "abc") == (KNOWN, [])


def test_scores_of_another_reference_are_refused(tmp_path):
    run_dir = RunDir(tmp_path)
    load(run_dir, "ab")
    other = recipe("x", preferences={"reference": str(tmp_path)})
    with pytest.raises(DataError, match="and the reference is"):
        load(run_dir, "ab", other)
