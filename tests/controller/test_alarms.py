"""Alarms over several steps."""

from __future__ import annotations

import pytest

from grpo_megatron.controller.alarms import Alarms


def lazy(alarms: Alarms, metrics: dict[str, float]) -> bool:
    return bool(alarms(metrics)["lazy_displacement"])


@pytest.mark.parametrize(
    ("gain", "growth", "wanted"),
    [(-0.1, 0.1, True), (-0.1, 0.0, False), (-0.1, -0.1, False), (0.1, 0.1, False)],
)
def test_lazy_displacement(gain, growth, wanted):
    alarms = Alarms(2.0)
    found = [
        lazy(alarms, {"step/logprob_gain_positive": gain, "grad/norm": 1 + growth * step})
        for step in range(15)
    ]
    assert found == [False] * 14 + [wanted]


def test_one_good_window_and_missing_values_are_no_alarm():
    alarms = Alarms(2.0)
    for step in range(40):
        good = step % 15 == 7
        assert not lazy(
            alarms, {"step/logprob_gain_positive": 9.0 if good else -0.1, "grad/norm": step}
        )
    assert not lazy(alarms, {})
    assert not lazy(alarms, {"step/logprob_gain_positive": float("nan"), "grad/norm": 1.0})
