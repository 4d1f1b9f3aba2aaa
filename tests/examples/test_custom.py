"""A reward and an objective of one's own, registered by their names in a recipe alone."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.case import read_case
from grpo_megatron.algorithms.evaluate import evaluate
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import load_objective
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rewards.pool import components_of

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = [
    "advantage=custom_objective:above_median",
    "clip=custom_objective:tanh_clip",
    "aggregation=custom_objective:root_length",
]


@pytest.fixture(autouse=True)
def in_the_directory_of_the_examples(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(EXAMPLES)


def test_objective_eval_computes_them(capsys):
    assert main(["objective", "eval", "--objective", "dr_grpo", *OWN, "case.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["advantages"] == [0.75, -0.25, 0.0]
    ratio = math.exp(0.1)
    term = 0.2 * math.tanh((ratio - 1) / 0.2) * 0.75
    slope = (1 - math.tanh((ratio - 1) / 0.2) ** 2) * ratio * 0.75
    assert found["grad_logprobs"][0][0] == pytest.approx(-slope / (3 * math.sqrt(2)))
    assert found["grad_logprobs"][2] == [0.0]
    first = (term + 0.0) / (3 * math.sqrt(2))
    down = math.exp(-0.1)
    up = math.exp(0.1)
    second = 0.2 * (math.tanh((down - 1) / 0.2) + math.tanh((up - 1) / 0.2)) * -0.25
    assert found["loss"] == pytest.approx(-first - second / (3 * math.sqrt(3)))


def test_micro_batches_do_not_change_them():
    case = read_case(Path("case.json"))
    config, own = load_objective("dr_grpo", [f"objective.{text}" for text in OWN], case.domains)
    objective = Objective(config, case.domains, own)
    whole = evaluate(objective, case.batch, case.columns)
    parts = [torch.tensor([2]), torch.tensor([0, 1])]
    split = evaluate(objective, case.batch, case.columns, parts=parts)
    assert split.loss == pytest.approx(whole.loss, abs=1e-12)
    np.testing.assert_allclose(split.gradient, whole.gradient, atol=1e-12)


OF_ANOTHER_SHAPE = """
def advantage(o, batch, groups):
    return batch.rewards[:-1]

def clip(o, inputs):
    return inputs.advantages.sum()

def aggregation(o, lengths):
    return [1.0]
"""


@pytest.mark.parametrize("choice", ["advantage", "clip", "aggregation"])
def test_a_function_that_returns_another_shape_is_refused(tmp_path, monkeypatch, choice):
    (tmp_path / "odd_shapes.py").write_text(OF_ANOTHER_SHAPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    case = read_case(Path("case.json"))
    config, own = load_objective("dr_grpo", [f"{choice}=odd_shapes:{choice}"], case.domains)
    with pytest.raises(ConfigError, match=f"odd_shapes:{choice} returned the shape"):
        evaluate(Objective(config, case.domains, own), case.batch, case.columns)


MISTAKEN = """
import numpy as np

from grpo_megatron.algorithms.custom import holds


def clip_of_one(o):
    return o

def clip_that_raises(o, inputs):
    return inputs.log_ratios

def clip_of_shapes(o, inputs):
    return inputs.log_ratio + inputs.log_ratio.new_zeros(2)

def number(o, inputs):
    return 3.0

def array(o, inputs):
    return np.zeros(inputs.log_ratio.shape)

def detached(o, inputs):
    return inputs.log_ratio.detach()

def advantage(o, batch):
    return batch.rewards

def aggregation(o, lengths):
    return lengths.tokens / None


def below(o, inputs):
    return {"low": inputs.log_ratio < -0.05}

@holds(below, plain_elsewhere=True)
def cutting(o, inputs):
    ratio = inputs.log_ratio.exp()
    return ratio.where(inputs.log_ratio >= -0.05, ratio.detach()) * inputs.advantages
"""


@pytest.fixture
def mistaken(tmp_path, monkeypatch):
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("clip=mistaken:clip_of_one", ["(o) cannot be called", "clip_of_one(o, inputs)"]),
        ("clip=mistaken:clip_that_raises", ["AttributeError", "'log_ratios'", "mistaken.py:11"]),
        ("clip=mistaken:clip_of_shapes", ["RuntimeError", "mistaken.py:14"]),
        ("clip=mistaken:number", ["returned float, wanted is a tensor of the shape (6,)"]),
        ("clip=mistaken:array", ["without gradient"]),
        ("clip=mistaken:detached", ["would not learn", "not detached"]),
        ("advantage=mistaken:advantage", ["(o, batch) cannot be called", "(o, batch, groups)"]),
        ("aggregation=mistaken:aggregation", ["raised TypeError", "mistaken.py:29"]),
    ],
)
def test_a_mistake_in_a_function_is_told_in_one_message(mistaken, capsys, setting, words):
    assert main(["objective", "eval", "--objective", "dr_grpo", setting, "case.json"]) == 2
    said = capsys.readouterr().err
    axis, _, choice = setting.partition("=")
    assert "Traceback" not in said
    assert f"where:  objective.{axis} = {choice!r}" in said and "remedy:" in said
    for word in words:
        assert word in said


def test_train_refuses_a_function_of_other_parameters_before_it_starts(mistaken, tmp_path, capsys):
    arguments = ["train", "custom.toml", f"runs_dir={tmp_path}"]
    assert main([*arguments, "objective.clip=mistaken:clip_of_one"]) == 2
    assert "cannot be called" in capsys.readouterr().err
    assert not (tmp_path / "custom").exists()


def test_a_clip_of_ones_own_says_which_tokens_it_holds(mistaken, capsys):
    setting = "clip=mistaken:cutting"
    assert main(["objective", "eval", "--objective", "dr_grpo", setting, "case.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grad_logprobs"][1][0] == 0.0 and found["grad_logprobs"][1][1] != 0.0
    assert found["metrics"]["clip/low_fraction"] == pytest.approx(1 / 6)


def test_groups_of_equal_rewards_are_a_signal_for_an_advantage_of_ones_own():
    batch = read_case(Path("case.json")).batch
    equal = replace(batch, rewards=torch.ones_like(batch.rewards))
    for overrides, expected in ((OWN, True), ((), False)):
        config, _ = load_objective("dr_grpo", overrides)
        assert carries_signal(config, equal) is expected


def test_the_reward_binds_with_the_arguments_of_the_recipe():
    [domain] = resolve("custom.toml").config.domains
    [component] = components_of(domain, 6)
    scores = [component.reward(text, "100", {}) for text in ("100", "90", "300", "?")]
    assert scores == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("clip=custom_objective:tanh_clipp", ["did you mean 'tanh_clip'", "objective.clip"]),
        ("clip=custom_objectives:tanh_clip", ["no module 'custom_objectives'"]),
        ("advantage=custom_objective:np", ["not a function", "objective.advantage"]),
        ("clip=tanh_clip", ["must be one of: ppo", "none; or module:function"]),
        ("clip=custom_objective.tanh_clip", ["objective.clip=custom_objective:tanh_clip"]),
        ("clip=custom_objective:", ["must be one of: ppo"]),
    ],
)
def test_a_function_that_is_not_there_is_told(capsys, setting, words):
    assert main(["objective", "eval", "--objective", "dr_grpo", setting, "case.json"]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


def test_train_refuses_a_function_that_is_not_there_before_it_starts(tmp_path, capsys):
    arguments = ["train", "custom.toml", f"runs_dir={tmp_path}"]
    assert main([*arguments, "objective.clip=custom_objective:tanh_clipp"]) == 2
    assert "did you mean 'tanh_clip'" in capsys.readouterr().err
    assert not (tmp_path / "custom").exists()


def test_numbers_of_another_shape_are_told():
    case = read_case(Path("case.json"))
    overrides = ["objective.advantage=tests.examples.test_custom:one_number"]
    config, own = load_objective("dr_grpo", overrides, case.domains)
    with pytest.raises(ConfigError, match=r"shape \(1,\), wanted is \(3,\)"):
        evaluate(Objective(config, case.domains, own), case.batch, case.columns)


def one_number(o, batch, groups):
    return torch.zeros(1)


def test_a_recipe_keeps_functions_when_it_is_read_again(tmp_path):
    from grpo_megatron.config.loader import read_resolved, write_resolved

    resolved = resolve("custom.toml")
    write_resolved(tmp_path / "config.json", resolved)
    again = read_resolved(tmp_path / "config.json").config
    assert again.objective.clip == "custom_objective:tanh_clip"
