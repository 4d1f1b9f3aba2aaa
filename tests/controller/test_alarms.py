"""Alarms over several steps."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from grpo_megatron.config import schema
from grpo_megatron.config.alarms import AlarmsConfig
from grpo_megatron.config.objective import PRESETS
from grpo_megatron.controller.alarms import Alarms, alarms_of, watched_metrics
from grpo_megatron.plan.resolve import resolve
from tests.controller.loops import Loop
from tests.controller.scored_groups import recipe

LIMITS = AlarmsConfig(window=4)


def alarms_with(limits: AlarmsConfig = LIMITS, **tables) -> Alarms:
    return Alarms(limits, watched_metrics(recipe(**tables)), load_limit=2.0)


def lazy(alarms: Alarms, metrics: dict[str, float]) -> bool:
    return bool(alarms(metrics)["lazy_displacement"])


@pytest.mark.parametrize(
    ("gain", "growth", "wanted"),
    [(-0.1, 0.1, True), (-0.1, 0.0, False), (-0.1, -0.1, False), (0.1, 0.1, False)],
)
def test_lazy_displacement(gain, growth, wanted):
    alarms = alarms_with()
    found = [
        lazy(alarms, {"step/logprob_gain_positive": gain, "grad/norm": 1 + growth * step})
        for step in range(15)
    ]
    assert found == [False] * 14 + [wanted]


def test_one_good_window_and_missing_values_are_no_alarm():
    alarms = alarms_with()
    for step in range(40):
        good = step % 15 == 7
        assert not lazy(
            alarms, {"step/logprob_gain_positive": 9.0 if good else -0.1, "grad/norm": step}
        )
    unknown = {"step/logprob_gain_positive": float("nan"), "grad/norm": 1.0}
    for metrics in ({}, unknown, {"grad/norm": 1.0}, {"step/logprob_gain_positive": -0.1}):
        assert "lazy_displacement" not in alarms(metrics)


def test_an_alarm_stays_on_over_steps_that_do_not_measure_its_metric():
    alarms = alarms_with()
    bad = {"routing/load_max_ratio": 2.1}
    for step in range(15):
        alarms({"step/logprob_gain_positive": -0.1, "grad/norm": 1 + step, **bad})
    assert alarms.on == {"lazy_displacement", "expert_load"}
    assert alarms({"policy/entropy": 0.3}) == {"entropy_collapse": "", "entropy_explosion": ""}
    assert alarms.on == {"lazy_displacement", "expert_load"}
    alarms({"routing/load_max_ratio": 1.0})
    assert alarms.on == {"lazy_displacement"}


def test_expert_load_needs_no_window():
    alarms = alarms_with()
    assert "routing.load_alarm = 2" in alarms({"routing/load_max_ratio": 2.1})["expert_load"]
    assert alarms.on == {"expert_load"}
    assert alarms({"routing/load_max_ratio": 2.0})["expert_load"] == "" and not alarms.on


def test_unscorable_samples_need_no_window():
    alarms = alarms_with()
    text = alarms({"reward/unscorable_fraction": 0.96})["unscorable"]
    assert text.startswith("96% of the step's samples could not be scored")
    assert "alarms.unscorable_fraction = 0.25" in text
    known = {".".join(map(str, path)) for path in schema.all_fields()}
    named = set(re.findall(r"\b(?:alarms|data)\.[a-z_]+\b", text))
    assert named == {"alarms.unscorable_fraction", "data.reward_timeout_s"} <= known
    assert alarms.on == {"unscorable"}
    assert alarms({"reward/unscorable_fraction": 0.25})["unscorable"] == "" and not alarms.on
    for metrics in ({}, {"reward/unscorable_fraction": None}):
        assert "unscorable" not in alarms(metrics)
    never = alarms_with(AlarmsConfig(unscorable_fraction=1.0))
    assert never({"reward/unscorable_fraction": 1.0})["unscorable"] == ""


def test_episodes_that_fail_are_named():
    metrics = {"reward/unscorable_fraction": 0.96, "environment/sums/spoilt": 7.0}
    metrics |= {"environment/sums/episodes": 3.0, "environment/sums/lost": 0.0}
    text = alarms_with()(metrics)["unscorable"]
    assert text.endswith("environment/sums/spoilt = 7; logs/latest/worker-*.log has why")


def test_a_step_in_which_rewards_fail_is_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "grpo_megatron.controller.rl_loop.show",
        lambda kind, **values: said.append(values["text"]) if kind == "message" else None,
    )

    def answer(step, prompt, sample):
        if step == 1 and sample > 0:
            return float("nan")
        return float(sample % 2)

    loop = Loop(tmp_path, recipe(num_steps=3), answer=answer)
    loop.run()
    assert [record["alarm/unscorable"] for record in loop.metrics()] == [0, 1, 0]
    assert [record["reward/unscorable"] for record in loop.metrics()] == [0, 12, 0]
    [told] = [text for text in said if "could not be scored" in text]
    assert told.startswith("step 1: 75% of the step's samples")


# alarm, metric, values that are fine for ever, and values that end in the alarm
CASES = [
    ("entropy_collapse", "policy/entropy", [0.01], [0.3, 0.001]),
    ("entropy_explosion", "policy/entropy", [0.3, 1.2], [0.3, 1.3]),
    ("entropy_explosion", "policy/entropy", [0.02, 0.9], [0.02, 1.1]),
    ("reference_kl", "reference/k3", [0.1, 0.5], [0.1, 0.6]),
    ("length_growth", "response/length_mean", [100, 200, 400], [100, 201]),
    ("no_signal", "group/all_equal_fraction", [0.9], [0.3, 0.95]),
    ("clip_fraction", "clip/region_fraction", [0.15, 0.4], [0.15, 0.5]),
]


@pytest.mark.parametrize(("alarm", "metric", "fine", "bad"), CASES)
def test_an_alarm_is_on_after_a_whole_window(alarm, metric, fine, bad):
    alarms = alarms_with()
    for value in np.repeat(fine, LIMITS.window).tolist():
        assert alarms({metric: value})[alarm] == ""
    alarms = alarms_with()
    on = []
    for value in np.repeat(bad, LIMITS.window).tolist():
        on.append(bool(alarms({metric: value})[alarm]))
    assert on[0] is on[LIMITS.window - 1] is False and on[-1] is True
    assert alarms.on == {alarm}


@pytest.mark.parametrize(("alarm", "metric"), [case[:2] for case in CASES])
def test_missing_and_unknown_values_say_nothing(alarm, metric):
    alarms = alarms_with()
    for metrics in ({}, {metric: None}, {metric: float("nan")}, {metric: float("inf")}):
        for _ in range(3 * LIMITS.window):
            assert alarm not in alarms(metrics)
    assert alarms({metric: 0.5})[alarm] == ""


@pytest.mark.parametrize(
    ("alarm", "metric", "limits"),
    [
        ("entropy_collapse", "policy/entropy", {"min_entropy": 0.0}),
        ("no_signal", "group/all_equal_fraction", {"no_signal_fraction": 1.0}),
        ("clip_fraction", "clip/region_fraction", {"clip_fraction": 1.0}),
    ],
)
def test_an_alarm_that_is_never_wanted(alarm, metric, limits):
    value = 0.0 if alarm == "entropy_collapse" else 1.0
    for limit, wanted in ((limits, False), ({}, True)):
        alarms = alarms_with(AlarmsConfig(window=2, **limit))
        found = [bool(alarms({metric: value})[alarm]) for _ in range(8)]
        assert any(found) == wanted


def test_remedies_are_settings():
    known = {".".join(map(str, path)) for path in schema.all_fields()}
    for alarm, metric, _, bad in CASES:
        alarms = alarms_with()
        for value in np.repeat(bad, LIMITS.window).tolist():
            text = alarms({metric: value})[alarm]
        named = re.findall(r"\b[a-z_]+\.[a-z_]+\b", text)
        assert len(named) > 1 and set(named) <= known, text


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("grpo", True),
        ("gspo", True),
        ("rloo", True),
        ("gfpo", True),
        ("reinforce_pp", False),  # measured against the batch
        ("reinforce_pp_baseline", False),
        ("deepseekmath_process", False),  # sees steps
        ("mo_grpo", False),  # sees components
        ("gtpo_entropy", False),  # sees entropies
        ("grpo_lambda_length", False),  # sees lengths
        ("gagpo", False),  # sees turns
    ],
)
def test_groups_without_signal_are_those_of_which_all_advantages_are_0(preset, wanted):
    watched = watched_metrics(recipe(objective={"preset": preset}))
    assert any(rule.alarm == "no_signal" for rule in watched) == wanted


@pytest.mark.parametrize("preset", PRESETS)
def test_every_objective_can_be_watched(preset):
    assert len(watched_metrics(recipe(objective={"preset": preset}))) >= 5


def test_other_kinds_of_runs_are_not_watched():
    assert watched_metrics(resolve("stages/tiny-sft").config) == []


def test_a_resumed_run_keeps_its_first_window(tmp_path):
    config = recipe(alarms={"window": 4})
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "policy/entropy": 0.3, "reference/k3": None} for step in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alarms = alarms_of(config, file)
    for _ in range(4):
        texts = alarms({"policy/entropy": 1.3})
    assert "0.3 at first" in texts["entropy_explosion"]
    assert alarms_of(config, tmp_path / "none").on == frozenset()


def test_a_run_says_it_once_and_counts_every_step(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "grpo_megatron.controller.rl_loop.show",
        lambda kind, **values: said.append(values["text"]) if kind == "message" else None,
    )
    config = recipe(num_steps=5, alarms={"window": 2, "no_signal_fraction": 0.5})
    loop = Loop(tmp_path, config, answer=lambda step, prompt, sample: 1.0)
    loop.run()
    assert [record["alarm/no_signal"] for record in loop.metrics()] == [0, 1, 1, 1, 1]
    assert len(said) == 1 and said[0].startswith("step 1: 100% of the groups")


@pytest.mark.parametrize(
    ("distance", "word"), [(0.6, "older"), (-0.6, "younger"), (0.5, ""), (-0.5, "")]
)
def test_staleness_that_durations_do_not_explain(distance, word):
    alarms = alarms_with()
    texts = []
    for _ in range(LIMITS.window):
        texts.append(alarms({"staleness/unforeseen": distance})["unforeseen_staleness"])
    assert texts[:-1] == [""] * (LIMITS.window - 1)
    assert bool(texts[-1]) == bool(word)
    assert word in texts[-1]
    assert "unforeseen_staleness" not in alarms({"staleness/unforeseen": float("nan")})
