"""Every part on the GPUs of this machine (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.prove.parts import PARTS
from grpo_megatron.prove.prove import prove_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not Path("/dev/nvidia0").exists(), reason="there is no GPU here (/dev/nvidia0)"
    ),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_passes_or_is_not_possible_here(part, tmp_path):
    proof = prove_machine([part], tmp_path / "prove", minutes=9.0)  # raises where it failed
    [outcome] = proof.outcomes
    if outcome.status == "impossible":
        pytest.skip(outcome.problem)
