"""Benchmarks that read runs, of which an evaluation could score no answer."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import compare_ppo, learning_curve, staleness
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir

SCORED = {"prompts": 8.0, "accuracy": 0.75, "accuracy_unscorable": 0.0}
UNSCORED = {"prompts": 8.0, "accuracy_unscorable": 8.0}


def write_run(root, *, before, after, rates=()):
    """A finished run. before: of its result; after: the table of all prompts; rates: of each step,
    None where it could score nothing."""
    run = RunDir(root)
    root.mkdir(parents=True)
    run.result.write_text(json.dumps({"before": before, "eval": {"all": after}}))
    lines = []
    for step, rate in enumerate(rates):
        record = {"step": step}
        if rate is not None:
            record["accuracy/pass_at_1"] = rate
        lines.append(json.dumps(record) + "\n")
    run.metrics.write_text("".join(lines))
    return run


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_learning_curve_says_what_was_not_scored(tmp_path):
    write_run(tmp_path / "one", before=None, after=UNSCORED)
    write_run(tmp_path / "two", before=0.5, after=SCORED)
    told = learning_curve.label_of(tmp_path / "one")
    assert told == "one: held-out not scored before, not scored after"
    assert learning_curve.label_of(tmp_path / "two") == "two: held-out 0.50 before, 0.75 after"


def test_a_learning_curve_has_a_gap_where_nothing_was_scored(tmp_path):
    rates = [1.0, None] + 9 * [0.5] + 10 * [None] + [0.25]
    write_run(tmp_path / "run", before=0.5, after=SCORED, rates=rates)
    steps, smooth = learning_curve.success_by_step(tmp_path / "run")
    assert steps.tolist() == list(range(9, 22))
    assert smooth[0] == pytest.approx((1 + 8 * 0.5) / 9)
    assert np.flatnonzero(np.isnan(smooth)).tolist() == [11]
    assert smooth[12] == 0.25


def test_a_run_shorter_than_the_mean_has_no_curve(tmp_path):
    write_run(tmp_path / "run", before=0.5, after=SCORED, rates=[0.5, 0.5])
    steps, smooth = learning_curve.success_by_step(tmp_path / "run")
    assert len(steps) == len(smooth) == 0


def test_the_table_of_staleness_has_a_dash_for_what_was_not_scored(tmp_path):
    cases = [staleness.Case("gspo", 0, seed) for seed in (0, 1)]
    cases += [staleness.Case("topr", 0, seed) for seed in (0, 1)]
    write_run(tmp_path / "gspo-0-seed0", before=None, after=UNSCORED)
    write_run(tmp_path / "gspo-0-seed1", before=0.5, after=UNSCORED)
    write_run(tmp_path / "topr-0-seed0", before=0.875, after=SCORED)
    write_run(tmp_path / "topr-0-seed1", before=0.875, after=UNSCORED)
    *_, gspo, topr = staleness.table(tmp_path, cases).splitlines()
    assert cells(gspo)[:6] == ["gspo", "0", "2", "0.50", "–", "–"]
    assert cells(topr)[:6] == ["topr", "0", "2", "0.88", "0.75", "1"]


def test_a_run_without_an_accuracy_has_not_collapsed():
    outcome = staleness.Outcome(math.nan, 0.5, math.nan, math.nan, math.nan)
    assert math.isnan(outcome.collapsed)


def test_the_table_of_ppo_has_a_dash_for_what_was_not_scored(tmp_path):
    cases = [compare_ppo.Case("PPO", 0), compare_ppo.Case("PPO", 1)]
    resolved = resolve("demo/ppo-moe-cpu")
    for case, before, after in zip(cases, (None, 0.5), (UNSCORED, SCORED), strict=True):
        run = write_run(tmp_path / case.name, before=before, after=after, rates=[0.5])
        write_resolved(run.config, resolved)
    *_, unscored, scored = compare_ppo.results(tmp_path, cases).splitlines()
    assert cells(unscored)[4:6] == ["–", "–"]
    assert cells(scored)[4:6] == ["0.500", "0.750"]
