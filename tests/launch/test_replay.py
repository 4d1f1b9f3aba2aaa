"""What a replay says of the step beside its numbers."""

from __future__ import annotations

import pytest

from grpo_megatron.launch.replay import compare

ANEW = "which tokens are clipped or masked was not recorded, or is lost: decided anew"


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
