"""Preferences that a run's store holds, with the tokens that were sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.config.loader import load_recipe, write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorded_pairs import recorded_answers, refuse_no_recording
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.data.preferences import load_preferences
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.controller.scored_groups import stored

GROUPS = {"1 + 1 =": ["2", "3", "4"], "2 + 2 =": ["4", "5", "6"], "3 + 3 =": ["5", "5", "6"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three groups of the demo's domain; in the last one nothing but rewards differs."""
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    resolved = load_recipe("demo/gspo-moe-cpu")
    write_resolved(run_dir.config, resolved)
    write_tiny_model(run_dir.model, load_preset("tiny-qwen3-moe"))
    tokenizer = load_tokenizer(run_dir.model)
    domain = resolved.config.domains[0]
    groups = []
    for number, (question, answers) in enumerate(GROUPS.items()):
        completions = [completion(tokenizer, answer) for answer in answers]
        prompt = Prompt(question, domain.name, question, tuple(tokenizer.encode(question)), "")
        correct = np.array([1.0, 0.0, np.nan] if number < 2 else [0.0, 0.0, 0.0])
        components = {domain.accuracy_component: correct}
        group = RolloutGroup(prompt, tuple(completions), 0)
        groups.append(ScoredGroup(group, components, correct))
    record(run_dir, 0, groups, domain.name, tokenizer)
    return run_dir, tokenizer, domain.name


def completion(tokenizer, answer: str, *, behind: str | None = None) -> Completion:
    """behind: what the engine read in place of the prompt of the group."""
    ids = np.array([*tokenizer.encode(answer), tokenizer.eos_token_id], np.int32)
    span = (VersionSpan(0, 0, len(ids)),)
    answered_ids = None
    if behind is not None:
        answered_ids = tuple(tokenizer.encode(behind))
    logprobs = np.zeros(len(ids), np.float32)
    return Completion(ids, logprobs, span, "stop", answer, answered_ids=answered_ids)


def record(run_dir: RunDir, step: int, groups, domain: str, tokenizer) -> None:
    facts = StepFacts(kind="rl", domains=[domain])
    in_store = stored(run_dir.rollouts / "x", groups)
    record_step(run_dir.step_store(step), in_store, 1, facts, tokenizer.decode)


def recipe(run_dir: RunDir, loss: str = "dpo", **arguments) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "case",
            "kind": "preferences",
            "model": {"preset": "tiny-qwen3-moe"},
            "preferences": {"loss": loss},
            "domains": [
                {
                    "name": "own",
                    "source": "run",
                    "path": str(run_dir.root),
                    "arguments": arguments,
                }
            ],
            "data": {"num_validation": 0, "num_heldout": 1},
        }
    )


def load(config: RunConfig, tokenizer):
    return load_preferences(config, tokenizer, recorded_answers(config, tokenizer))


@pytest.mark.parametrize("how", ["best_worst", "correct_incorrect"])
def test_pairs_are_the_sampled_tokens(run, how):
    run_dir, tokenizer, _ = run
    found = load(recipe(run_dir, pairs=how), tokenizer)
    assert len(found.by_id) == 2 and f"1 groups without a pair ({how})" in "".join(found.dropped)
    for one in found.by_id.values():
        chosen, rejected = GROUPS[one.prompt.text][:2]
        assert (one.answers[0].text, one.answers[1].text) == (chosen, rejected)
        assert one.prompt.token_ids == tuple(tokenizer.encode(one.prompt.text))
        assert one.answers[0].token_ids[-1] == tokenizer.eos_token_id
        assert one.margin == 1.0


def test_labels_are_correctness(run):
    run_dir, tokenizer, _ = run
    found = load(recipe(run_dir, "kto"), tokenizer)
    labels = sorted(one.labels[0] for one in found.by_id.values())
    # NaN is no label; of the two equal answers to 3 + 3 one is left
    assert labels == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def odd_run(run, tmp_path_factory):
    """Groups whose best and worst samples have the same tokens, and others with an empty one."""
    of_demo, tokenizer, name = run
    run_dir = RunDir(tmp_path_factory.mktemp("odd"))
    resolved = load_recipe("demo/gspo-moe-cpu")
    write_resolved(run_dir.config, resolved)
    run_dir.model.symlink_to(of_demo.model)
    component = resolved.config.domains[0].accuracy_component
    odd = [("1 + 1 =", "2", "2"), ("2 + 2 =", "", "3"), ("3 + 3 =", "6", " ")]
    groups = []
    for question, best, worst in [*odd, ("4 + 4 =", "8", "7"), ("5 + 5 =", "10", "9")]:
        completions = (completion(tokenizer, best), completion(tokenizer, worst))
        prompt = Prompt(question, name, question, tuple(tokenizer.encode(question)), "")
        rewards = np.array([1.0, 0.0])
        group = RolloutGroup(prompt, completions, 0)
        groups.append(ScoredGroup(group, {component: rewards}, rewards))
    record(run_dir, 0, groups, name, tokenizer)
    return run_dir, tokenizer


def test_pairs_that_teach_nothing_are_left_out_and_counted(odd_run):
    run_dir, tokenizer = odd_run
    found = load(recipe(run_dir), tokenizer)
    assert sorted(one.prompt.text for one in found.by_id.values()) == ["4 + 4 =", "5 + 5 ="]
    assert sorted(found.dropped.items()) == [
        ("domain 'own': 1 with equal answers", 1),
        ("domain 'own': 2 with an empty answer", 2),
    ]


def test_empty_labelled_answers_are_left_out_and_counted(odd_run):
    run_dir, tokenizer = odd_run
    found = load(recipe(run_dir, "kto"), tokenizer)
    assert all(one.answers[0].text.strip() for one in found.by_id.values())
    assert found.dropped["domain 'own': 2 with an empty answer"] == 2


def test_a_pair_is_chosen_among_answers_that_are_not_empty(run, tmp_path):
    """The worst sample is empty, another one differs from the best."""
    of_demo, tokenizer, name = run
    run_dir = RunDir(tmp_path)
    resolved = load_recipe("demo/gspo-moe-cpu")
    write_resolved(run_dir.config, resolved)
    run_dir.model.symlink_to(of_demo.model)
    component = resolved.config.domains[0].accuracy_component
    groups = []
    for question in ("1 + 1 =", "2 + 2 ="):
        completions = tuple(completion(tokenizer, text) for text in ("2", "3", ""))
        prompt = Prompt(question, name, question, tuple(tokenizer.encode(question)), "")
        rewards = np.array([1.0, 0.5, 0.0])
        group = RolloutGroup(prompt, completions, 0)
        groups.append(ScoredGroup(group, {component: rewards}, rewards))
    record(run_dir, 0, groups, name, tokenizer)
    found = load(recipe(run_dir, pairs="best_worst"), tokenizer)
    pairs = [tuple(answer.text for answer in one.answers) for one in found.by_id.values()]
    assert pairs == [("2", "3"), ("2", "3")] and not found.dropped


@pytest.fixture(scope="module")
def aided_run(run, tmp_path_factory):
    """Two groups with samples that went on from something else than the question: retries behind
    an attempt, and answers behind a solved question. One retry has the highest reward."""
    of_demo, tokenizer, name = run
    run_dir = RunDir(tmp_path_factory.mktemp("aided"))
    resolved = load_recipe("demo/gspo-moe-cpu")
    write_resolved(run_dir.config, resolved)
    run_dir.model.symlink_to(of_demo.model)
    component = resolved.config.domains[0].accuracy_component
    groups = []
    for question in ("1 + 1 =", "2 + 2 ="):
        completions = (
            completion(tokenizer, "7", behind=f"{question}9 8 {question}"),
            completion(tokenizer, "5"),
            completion(tokenizer, "6"),
            completion(tokenizer, "4", behind=f"3 + 3 = 6 {question}"),
        )
        prompt = Prompt(question, name, question, tuple(tokenizer.encode(question)), "")
        rewards = np.array([1.0, 0.25, 0.5, 0.0])
        group = RolloutGroup(prompt, completions, 0)
        groups.append(ScoredGroup(group, {component: np.array([1.0, 0.0, 1.0, 0.0])}, rewards))
    record(run_dir, 0, groups, name, tokenizer)
    return run_dir, tokenizer


@pytest.mark.parametrize("how", ["best_worst", "correct_incorrect"])
def test_pairs_are_of_samples_behind_the_same_prompt(aided_run, how):
    run_dir, tokenizer = aided_run
    found = load(recipe(run_dir, pairs=how), tokenizer)
    assert sorted(one.prompt.text for one in found.by_id.values()) == ["1 + 1 =", "2 + 2 ="]
    for one in found.by_id.values():
        assert (one.answers[0].text, one.answers[1].text, one.margin) == ("6", "5", 0.25)
    assert any("4 samples behind another prompt" in text for text in found.dropped)


def test_labelled_answers_are_behind_what_they_were_sampled_behind(aided_run):
    run_dir, tokenizer = aided_run
    found = load(recipe(run_dir, "kto"), tokenizer)
    labelled = set()
    for one in found.by_id.values():
        labelled.add((one.prompt.text, one.answers[0].text, one.labels[0]))
        assert one.prompt.token_ids == tuple(tokenizer.encode(one.prompt.text))
    wanted = set()
    for question in ("1 + 1 =", "2 + 2 ="):
        wanted.add((f"{question}9 8 {question}", "7", 1.0))
        wanted.add((question, "5", 0.0))
        wanted.add((question, "6", 1.0))
        wanted.add((f"3 + 3 = 6 {question}", "4", 0.0))
    assert labelled == wanted


def test_a_group_whose_samples_all_have_another_prompt_has_no_pair(run, tmp_path):
    of_demo, tokenizer, name = run
    run_dir = RunDir(tmp_path)
    resolved = load_recipe("demo/gspo-moe-cpu")
    write_resolved(run_dir.config, resolved)
    run_dir.model.symlink_to(of_demo.model)
    component = resolved.config.domains[0].accuracy_component
    prompt = Prompt("p", name, "1 + 1 =", tuple(tokenizer.encode("1 + 1 =")), "")
    completions = (
        completion(tokenizer, "2", behind="1 + 1 =3 1 + 1 ="),
        completion(tokenizer, "4", behind="1 + 1 =4 1 + 1 ="),
    )
    rewards = np.array([1.0, 0.0])
    group = ScoredGroup(RolloutGroup(prompt, completions, 0), {component: rewards}, rewards)
    record(run_dir, 0, [group], name, tokenizer)
    recorded = recorded_answers(recipe(run_dir), tokenizer)["own"]
    assert recorded.pairs == []
    assert sum(recorded.dropped.values()) == 2  # the second sample, and the group


def test_what_is_no_recording(run, tmp_path):
    run_dir, _, name = run
    with pytest.raises(DataError, match="no run is there"):
        refuse_no_recording(recipe(RunDir(tmp_path)).domains[0])
    with pytest.raises(DataError, match=r"arguments.pairs is 'best'") as error:
        refuse_no_recording(recipe(run_dir, pairs="best").domains[0])
    assert "best_worst" in str(error.value)
    with pytest.raises(DataError, match="no domain 'x'"):
        refuse_no_recording(recipe(run_dir, domain="x").domains[0])
    refuse_no_recording(recipe(run_dir, domain=name).domains[0])
    empty = replace(run_dir, root=tmp_path)
    (tmp_path / "config.json").write_bytes(run_dir.config.read_bytes())
    with pytest.raises(DataError, match="no recorded step"):
        refuse_no_recording(recipe(empty).domains[0])


def test_another_tokenizer_is_refused(run):
    run_dir, tokenizer, _ = run
    config = recipe(run_dir)
    other = load_tokenizer(run_dir.model)
    other.__dict__["fingerprint"] = "other"
    with pytest.raises(DataError, match="another tokenizer"):
        recorded_answers(config, other)
    assert recorded_answers(config, tokenizer)
