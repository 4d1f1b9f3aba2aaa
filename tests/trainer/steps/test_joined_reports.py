"""One report of a step of which every domain was trained by itself."""

from __future__ import annotations

import pytest

from grpo_megatron.trainer.requests import TrainReport
from grpo_megatron.trainer.steps.joined_reports import joined_metrics, joined_report

UNITS = {"clip": "tokens", "ratio": "max", "loss": "sum"}


def report(tokens: int, state: dict, **metrics: float) -> TrainReport:
    return TrainReport(
        metrics=metrics,
        normalisers=UNITS,
        state=state,
        updates=tokens // 10,
        losses=[float(tokens)],
        grad_norms=[tokens / 2],
        tokens=tokens,
        train_s=1.0,
    )


def test_metrics_of_all_domains_and_of_each():
    """What a report says of a domain that is not its own is of no sample."""
    of_math = {"clip": 0.2, "ratio": 3.0, "loss": 1.0, "clip@math": 0.2, "clip@code": 0.0}
    of_code = {"clip": 0.6, "ratio": 2.0, "loss": 0.5, "only_here": 7.0, "clip@math": 0.0}
    math = report(30, {"lambda": 1.0}, **of_math)
    code = report(10, {}, **of_code)
    before = {"code": {"lambda": 5.0}, "absent": {"lambda": 2.0}}
    found = joined_report({"math": math, "code": code}, before)
    assert found.metrics == pytest.approx(
        {
            "clip": 0.3,
            "ratio": 3.0,
            "loss": 1.5,
            "only_here": 7.0,
            "clip@math": 0.2,
            "clip@code": 0.6,
            "ratio@math": 3.0,
            "ratio@code": 2.0,
            "loss@math": 1.0,
            "loss@code": 0.5,
            "only_here@code": 7.0,
        }
    )
    assert found.state == {"math": {"lambda": 1.0}, "code": {}, "absent": {"lambda": 2.0}}
    assert (found.updates, found.tokens, found.train_s) == (3, 40, 2.0)
    assert (found.losses, found.grad_norms) == ([30.0, 10.0], [15.0, 5.0])


def test_where_nothing_was_trained_a_mean_is_plain():
    reports = {"math": report(0, {}, clip=0.0), "code": report(0, {}, clip=1.0)}
    assert joined_report(reports, {}).metrics["clip"] == 0.5


def test_counts_are_added_and_ratios_are_not_evened_out():
    math = {"batch/unscorable": 10.0, "routing/missing_routes": 40.0, "routing/load_max_ratio": 2.0}
    code = {"batch/unscorable": 0.0, "routing/missing_routes": 60.0, "routing/load_max_ratio": 5.0}
    found = joined_metrics([(math, 30), (code, 10)], {})
    assert found == {
        "batch/unscorable": 10.0,
        "routing/missing_routes": 100.0,
        "routing/load_max_ratio": 5.0,
    }


def test_equal_numbers_stay_as_they_are():
    rate = 3e-4 / 7
    assert joined_metrics([({"lr": rate}, 11), ({"lr": rate}, 17), ({"lr": rate}, 5)], {}) == {
        "lr": rate
    }


def test_metrics_of_domains_have_the_normalisers_of_what_they_are_of():
    found = joined_report({"math": report(30, {}, clip=0.2, other=1.0)}, {})
    assert found.normalisers == UNITS | {"clip@math": "tokens"}
