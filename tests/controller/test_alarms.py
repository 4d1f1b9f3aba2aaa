"""Alarms over several steps."""

from __future__ import annotations

import pytest

from grpo_megatron.controller.alarms import LazyDisplacement


@pytest.mark.parametrize(("gain", "growth", "wanted"), [
    (-0.1, 0.1, True), (-0.1, 0.0, False), (-0.1, -0.1, False), (0.1, 0.1, False)])
def test_lazy_displacement(gain, growth, wanted):
    alarm = LazyDisplacement()
    found = [alarm({"step/logprob_gain_positive": gain, "grad/norm": 1 + growth * step})
             for step in range(15)]
    assert found == [False] * 14 + [wanted]


def test_one_good_window_and_missing_values_are_no_alarm():
    alarm = LazyDisplacement()
    for step in range(40):
        good = step % 15 == 7
        assert not alarm({"step/logprob_gain_positive": 9.0 if good else -0.1,
                          "grad/norm": step})
    assert not alarm({}) and not alarm({"step/logprob_gain_positive": float("nan"),
                                        "grad/norm": 1.0})
