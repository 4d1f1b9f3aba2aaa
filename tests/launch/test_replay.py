"""What a replay says of the step beside its numbers."""

from __future__ import annotations

import re

import pytest

from grpo_megatron.launch.replay import compare

ANEW = "which tokens are clipped or masked was not recorded, or is lost: decided anew"


def test_columns_of_numbers_have_names():
    recorded = {"loss/value": 1.0, "time/train_s": 3.0, "grad/norm": 2.5}
    found = {"loss/value": 1.5, "time/train_s": 4.0, "grad/norm": 2.5}
    header, *rows = [re.split(r"\s{2,}", line.strip()) for line in compare(recorded, found)][:3]
    assert header == ["metric", "recorded", "now", "change"]
    assert rows == [["loss/value", "1", "1.5", "0.5"], ["grad/norm", "2.5", "2.5", "0"]]


def test_a_recorded_value_that_was_not_finite_is_no_crash():
    lines = list(compare({"ratio/max": None}, {"ratio/max": 2.0}))
    assert re.split(r"\s{2,}", lines[1].strip()) == ["ratio/max", "not finite", "2", "–"]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"replay/decisions_recorded": 0.0, "replay/decisions_changed": 0.0}, ANEW),
        (
            {"replay/decisions_recorded": 1.0, "replay/decisions_changed": 0.25},
            "tokens on the other side of a clip or mask bound now: 25.000%, held as recorded",
        ),
    ],
)
def test_whether_decisions_were_recorded_is_told(found, line):
    assert [text.strip() for text in compare({}, found)] == [line]
